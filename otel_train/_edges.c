/* Edges and hooks of the training thread, the handler of SIGTERM, and a thread that reads device events. All but that
   thread run with the interpreter lock held. Where this was not built, otel_train does the same in Python.
   One writer belongs to one ring. Its owner is the only thread that writes; what other threads say goes to
   `elsewhere`. The stable ABI of Python 3.11 is all that is used, so one build serves every later version. */

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define EDGE_WORDS 2        /* codes.EDGE_WORDS: code, then time */
#define SAMPLED 61          /* ring.SAMPLED */
#define PREEMPTED_NS 100000 /* ring.PREEMPTED_NS */
#define PAYLOAD_SHIFT 20    /* events.PAYLOAD_SHIFT */
#define THIS_THREAD ((unsigned long)pthread_self()) /* what threading.get_ident() gives */

typedef struct {
    PyObject_HEAD
    Py_buffer buffer;     /* the ring; buffer.obj is NULL once it is given back */
    Py_buffer progress;   /* where readers in other processes look; as above, and NULL where there are none */
    int64_t *words;       /* its memory; NULL once it is given back */
    int64_t *shown;       /* memory of `progress`: words written, nanoseconds spent */
    uint64_t mask;        /* words - 1 */
    int64_t position;     /* words written in all */
    int64_t spent_ns;     /* by the edges that were timed */
    unsigned long owner;  /* identity of the thread that may write; 0 for none */
    PyObject *elsewhere;  /* takes the codes of all others */
    PyObject *clock;      /* NULL: the system's monotonic clock */
} Writer;

/* Now; -1 with an exception set where the clock is the program's and raises. */
static int64_t now_ns(const Writer *self) {
    if (self->clock == NULL) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    }
    PyObject *now = PyObject_CallNoArgs(self->clock);
    if (now == NULL) return -1;
    int64_t ns = PyLong_AsLongLong(now);
    Py_DECREF(now);
    return ns;
}

/* Memory of at least so many words that another process or a signal handler may look at. */
static int get_words(PyObject *memory, Py_buffer *buffer, Py_ssize_t least) {
    if (PyObject_GetBuffer(memory, buffer, PyBUF_SIMPLE | PyBUF_WRITABLE) < 0) return -1;
    if (buffer->len >= least * (Py_ssize_t)sizeof(int64_t) && (uintptr_t)buffer->buf % sizeof(int64_t) == 0) return 0;
    PyErr_Format(PyExc_ValueError, "memory of %zd bytes: expected at least %zd words, aligned", buffer->len, least);
    PyBuffer_Release(buffer);
    return -1;
}

#define FAILED(ns) ((ns) == -1 && PyErr_Occurred())
#define IS_SAMPLE(self) ((uint64_t)(self)->position % (SAMPLED * EDGE_WORDS) == 0)

/* Write one edge; -1 with an exception set where that fails. The position moves last: what lies before it is whole. `begun` is
   when the hook began that writes it, if it is timed; else 0. */
static int write_edge(Writer *self, int64_t word, int64_t begun) {
    if (THIS_THREAD != self->owner) {
        PyObject *other = PyObject_CallFunction(self->elsewhere, "L", (long long)word);
        Py_XDECREF(other);
        return other == NULL ? -1 : 0;
    }
    uint64_t slot = (uint64_t)self->position & self->mask;
    int sample = IS_SAMPLE(self);
    int64_t ns;
    if (sample && !begun && FAILED(begun = now_ns(self))) return -1;
    if (FAILED(ns = now_ns(self))) return -1;
    if (self->words == NULL) return 0; /* given back while the program's clock was asked */
    self->words[slot] = word;
    __atomic_store_n(&self->words[slot + 1], ns, __ATOMIC_RELEASE); /* a new time means a whole edge */
    __atomic_store_n(&self->position, self->position + EDGE_WORDS, __ATOMIC_RELEASE);
    if (self->shown != NULL) __atomic_store_n(&self->shown[0], self->position, __ATOMIC_RELEASE);
    if (sample) {
        int64_t ended = now_ns(self);
        if (FAILED(ended)) return -1;
        if (ended - begun < PREEMPTED_NS) self->spent_ns += ended - begun;
        if (self->shown != NULL) self->shown[1] = self->spent_ns;
    }
    return 0;
}

static PyObject *writer_edge(PyObject *object, PyObject *code) {
    int64_t word = PyLong_AsLongLong(code);
    if (FAILED(word) || write_edge((Writer *)object, word, 0) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *writer_read(PyObject *object, PyObject *Py_UNUSED(none)) {
    return Py_BuildValue("LL", (long long)((Writer *)object)->position, (long long)((Writer *)object)->spent_ns);
}

static PyObject *writer_disown(PyObject *object, PyObject *Py_UNUSED(none)) {
    Writer *self = (Writer *)object;
    self->owner = 0;
    self->words = self->shown = NULL;
    if (self->buffer.obj != NULL) PyBuffer_Release(&self->buffer);
    if (self->progress.obj != NULL) PyBuffer_Release(&self->progress);
    Py_RETURN_NONE;
}

static PyObject *writer_lend(PyObject *object, PyObject *args) {
    Writer *self = (Writer *)object;
    unsigned long to;
    PyObject *others, *before = self->elsewhere;
    if (!PyArg_ParseTuple(args, "kO:lend", &to, &others)) return NULL;
    self->owner = self->words == NULL ? 0 : to;
    self->elsewhere = Py_NewRef(others);
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

static PyObject *writer_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *words, *clock, *elsewhere, *progress = Py_None;
    unsigned long owner;
    if (!PyArg_ParseTuple(args, "OOkO|O:Writer", &words, &clock, &owner, &elsewhere, &progress)) return NULL;
    Writer *self = (Writer *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) return NULL;
    int bad = get_words(words, &self->buffer, EDGE_WORDS) < 0 || (progress != Py_None && get_words(progress, &self->progress, 2) < 0);
    self->mask = (uint64_t)self->buffer.len / sizeof(int64_t) - 1;
    if (!bad && (bad = ((self->mask + 1) & self->mask) != 0))
        PyErr_Format(PyExc_ValueError, "ring of %llu words: expected a power of two", (unsigned long long)self->mask + 1);
    self->words = self->buffer.buf;
    self->shown = self->progress.buf;
    self->owner = owner;
    self->elsewhere = Py_NewRef(elsewhere);
    self->clock = clock == Py_None ? NULL : Py_NewRef(clock);
    if (bad) Py_CLEAR(self);
    return (PyObject *)self;
}

/* The buffer is not visited: the owner of the memory does not refer to us, and a memoryview that the collector has
   cleared before it is given back crashes the interpreter. */
static int writer_traverse(PyObject *object, visitproc visit, void *arg) {
    Writer *self = (Writer *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->elsewhere);
    Py_VISIT(self->clock);
    return 0;
}

/* An edge may still come, from another object of the same cycle: `elsewhere` stays, and the cycle ends at the recorder. */
static int writer_clear(PyObject *object) {
    Py_CLEAR(((Writer *)object)->clock);
    return 0;
}

static void writer_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    Py_DECREF(writer_disown(object, NULL));
    Py_CLEAR(((Writer *)object)->clock);
    Py_CLEAR(((Writer *)object)->elsewhere);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* A hook may meet a Writer of this module as it was before it was imported again. */
static PyObject *writer_call(PyObject *object, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *code;
    return PyArg_ParseTuple(args, "O:Writer", &code) ? writer_edge(object, code) : NULL;
}

static PyMethodDef writer_methods[] = {
    {"edge", writer_edge, METH_O, "Write one edge: a code, and now."},
    {"read", writer_read, METH_NOARGS, "Words written in all, and nanoseconds that the timed edges took."},
    {"disown", writer_disown, METH_NOARGS, "Write no more, and give the memory back."},
    {"lend", writer_lend, METH_VARARGS, "lend(owner, elsewhere): another owner, 0 for none."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot writer_slots[] = {
    {Py_tp_doc, "Writer(words, clock, owner, elsewhere, progress=None): clock None is the system's."},
    {Py_tp_new, writer_new},
    {Py_tp_call, writer_call},
    {Py_tp_traverse, writer_traverse},
    {Py_tp_clear, writer_clear},
    {Py_tp_dealloc, writer_dealloc},
    {Py_tp_methods, writer_methods},
    {0, NULL},
};

static PyType_Spec writer_spec = {
    .name = "otel_train._edges.Writer", .basicsize = sizeof(Writer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, .slots = writer_slots};

/* Hooks: what stands in torch's functions. Each is a builtin function whose self is a tuple of what it needs, `edge` first: a
   Writer, or any callable that takes a code. The same in Python is in otel_train/instrumentation. Torch's work between two hooks
   empties the caches, so each function of the interpreter that a hook calls costs much more than its instructions. */
#define FIELD(place) PyTuple_GetItem(state, (place))
enum { NEXT, ASK, SIZE, RAISED, TRAINING, SHAPE, DUNDER_NEXT };
static PyObject *names[DUNDER_NEXT + 1]; /* interned */

static int intern_names(void) {
    static const char *const texts[] = {"_otel_train_next", "_otel_train_ask", "size", "raised", "training", "shape", "__next__"};
    for (int place = NEXT; place <= DUNDER_NEXT; place++)
        if (names[place] == NULL && (names[place] = PyUnicode_InternFromString(texts[place])) == NULL) return -1;
    return 0;
}

static PyTypeObject *writer_type;

/* Now, where the next edge is timed: with it all that a hook does on this side of the program's own call. Else 0. */
static int64_t hook_begins(PyObject *edge) {
    Writer *self = Py_TYPE(edge) == writer_type ? (Writer *)edge : NULL;
    return self && self->clock == NULL && IS_SAMPLE(self) ? now_ns(self) : 0;
}

static int put(PyObject *edge, int64_t word, int64_t begun) {
    if (Py_TYPE(edge) == writer_type) return write_edge((Writer *)edge, word, begun);
    PyObject *done = PyObject_CallFunction(edge, "L", (long long)word);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

#define PUT(edge, code, begun) put((edge), PyLong_AsLongLong(code), begun) /* callers pass integers only */
#define WORDS(place) ((const int64_t *)PyBytes_AsString(FIELD(place))) /* codes, packed */

/* Write words[0], or words[1] where there is no result: its exception stays, whatever becomes of the edge. */
static PyObject *finish(PyObject *edge, const int64_t *words, PyObject *result) {
    PyObject *type, *value, *traceback;
    if (result != NULL) {
        if (put(edge, words[0], 0) < 0) Py_CLEAR(result);
        return result;
    }
    PyErr_Fetch(&type, &value, &traceback);
    put(edge, words[1], 0);
    PyErr_Restore(type, value, traceback);
    return NULL;
}

/* edge, call, (end, fail, begin), when, otherwise: `call` where its keyword `when` is True, else `otherwise`, untimed. */
static PyObject *timed(PyObject *state, PyObject *args, PyObject *kwargs) {
    PyObject *edge = FIELD(0);
    int64_t begun = hook_begins(edge);
    const int64_t *words = WORDS(2);
    if (kwargs == NULL || PyDict_GetItemWithError(kwargs, FIELD(3)) != Py_True)
        return PyErr_Occurred() ? NULL : PyObject_Call(FIELD(4), args, kwargs);
    if (put(edge, words[2], begun) < 0) return NULL;
    return finish(edge, words, PyObject_Call(FIELD(1), args, kwargs));
}

static PyObject *with_first(PyObject *item, PyObject *others) {
    Py_ssize_t count = PyTuple_Size(others);
    PyObject *all = PyTuple_New(count + 1);
    if (all == NULL) return NULL;
    PyTuple_SetItem(all, 0, Py_NewRef(item));
    for (Py_ssize_t place = 0; place < count; place++) PyTuple_SetItem(all, place + 1, Py_NewRef(PyTuple_GetItem(others, place)));
    return all;
}

/* edge, call, bare, (end, fail, and begins by flags), open_in, is_grad_enabled, task: forward(model, args, kwargs). `call` takes the
   model first unless it is `bare`. A part's has `task`, which gives -1 outside of a backward: inside one, and inside an open
   forward, it only calls. */
static PyObject *forward(PyObject *state, PyObject *const *given, Py_ssize_t count) {
    if (count != 3) return PyErr_Format(PyExc_TypeError, "forward: expected 3 arguments");
    PyObject *edge = FIELD(0), *model = given[0], *task_of = FIELD(6), *result = NULL;
    const int64_t *words = WORDS(3);
    volatile unsigned long *open_in = (unsigned long *)PyByteArray_AsString(FIELD(4)), here = THIS_THREAD;
    int64_t begun = hook_begins(edge);
    PyObject *args = FIELD(2) == Py_True ? Py_NewRef(given[1]) : with_first(model, given[1]);
    if (args == NULL) return NULL;
    int inside = *open_in == here, records = task_of == Py_None || !inside;
    if (records && task_of != Py_None) {
        PyObject *task = PyObject_CallNoArgs(task_of);
        records = task == NULL ? -1 : PyLong_AsLongLong(task) == -1;
        Py_XDECREF(task);
    }
    if (records > 0) {
        PyObject *training = PyObject_GetAttr(model, names[TRAINING]);
        PyObject *grad = training == NULL ? NULL : PyObject_CallNoArgs(FIELD(5));
        int trains = grad == NULL ? -1 : training == Py_True ? 1 : PyObject_IsTrue(training);
        Py_XDECREF(training), Py_XDECREF(grad); /* the latter is a bool, and lives on */
        if (trains < 0 || put(edge, words[2 + 2 * trains + (grad == Py_True)], begun) < 0) records = -1;
        else if (!inside) *open_in = here;
    }
    if (records >= 0) result = PyObject_Call(FIELD(1), args, given[2]);
    Py_DECREF(args);
    if (records > 0 && !inside) *open_in = 0; /* not another thread's, which may be over */
    return records > 0 ? finish(edge, words, result) : result;
}

/* edge, words by the identity of an optimizer, (begin, end, fail) packed, join: before(optimizer, args, kwargs). `join` gives the words
   of a new optimizer; it is None in the hook after the step. */
static PyObject *update(PyObject *state, PyObject *const *given, Py_ssize_t count) {
    PyObject *edge = FIELD(0), *join = FIELD(2), *key = PyLong_FromVoidPtr(count > 0 ? given[0] : NULL);
    int64_t begun = hook_begins(edge);
    PyObject *words = key == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(FIELD(1), key));
    Py_XDECREF(key);
    if (words == NULL && !PyErr_Occurred() && join != Py_None && count > 0) words = PyObject_CallFunctionObjArgs(join, given[0], NULL);
    int bad = words == NULL ? PyErr_Occurred() != NULL : put(edge, ((int64_t *)PyBytes_AsString(words))[join == Py_None], begun) < 0;
    Py_XDECREF(words);
    return bad ? NULL : Py_NewRef(Py_None);
}

/* Its self is a key: the length of `batch[key]` along its first dimension, plus one; 0 where it has none. */
static PyObject *leading(PyObject *key, PyObject *batch) {
    PyObject *array = PyObject_GetItem(batch, key);
    PyObject *shape = array == NULL ? NULL : PyObject_GetAttr(array, names[SHAPE]);
    PyObject *first = shape == NULL ? NULL : PySequence_GetItem(shape, 0);
    long long length = first == NULL ? -1 : PyLong_AsLongLong(first);
    Py_XDECREF(array), Py_XDECREF(shape), Py_XDECREF(first);
    if (FAILED(length) && !PyErr_ExceptionMatches(PyExc_Exception)) return NULL;
    PyErr_Clear();
    return PyLong_FromLongLong(length + 1);
}

/* A loader's `__next__`. The iterator's `__dict__` has its state, (edge, `__next__` of its type, probe, the word that ends an
   ask), and the word that begins one. */
static PyObject *next_batch(PyObject *iterator, PyObject *Py_UNUSED(none)) {
    PyObject *about = PyObject_GenericGetDict(iterator, NULL), *batch = NULL, *word = NULL, *type, *value, *traceback;
    PyObject *state = about == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(about, names[NEXT]));
    PyObject *ask = state == NULL ? NULL : PyDict_GetItemWithError(about, names[ASK]);
    int64_t begun = ask == NULL ? 0 : hook_begins(FIELD(0));
    if (ask == NULL && !PyErr_Occurred()) /* the session is over, and the program kept this method */
        batch = PyObject_CallMethodObjArgs(iterator, names[DUNDER_NEXT], NULL);
    if (ask != NULL && PUT(FIELD(0), ask, begun) == 0) {
        if ((batch = PyObject_CallFunctionObjArgs(FIELD(1), iterator, NULL)) != NULL) {
            begun = hook_begins(FIELD(0));
            word = PyObject_CallMethodObjArgs(FIELD(2), names[SIZE], batch, NULL);
            int64_t samples = word == NULL ? -1 : PyLong_AsLongLong(word);
            if (FAILED(samples) || put(FIELD(0), PyLong_AsLongLong(FIELD(3)) | samples << PAYLOAD_SHIFT, begun) < 0) Py_CLEAR(batch);
        } else {
            PyErr_Fetch(&type, &value, &traceback);
            PyErr_NormalizeException(&type, &value, &traceback);
            word = PyObject_CallMethodObjArgs(FIELD(2), names[RAISED], iterator, value, NULL);
            if (word != NULL) PUT(FIELD(0), word, 0);
            PyErr_Restore(type, value, traceback);
        }
        Py_XDECREF(word);
    }
    Py_XDECREF(state), Py_XDECREF(about);
    return batch;
}

/* hook(name, state): a function; for "__next__" a method of the type that is its state. */
static PyObject *make_hook(PyObject *Py_UNUSED(module), PyObject *args) {
    static PyMethodDef kinds[] = {
        {"timed", (PyCFunction)(void (*)(void))timed, METH_VARARGS | METH_KEYWORDS, NULL},
        {"forward", (PyCFunction)(void (*)(void))forward, METH_FASTCALL, NULL},
        {"update", (PyCFunction)(void (*)(void))update, METH_FASTCALL, NULL},
        {"leading", leading, METH_O, NULL},
        {"__next__", next_batch, METH_NOARGS, NULL},
        {NULL, NULL, 0, NULL},
    };
    PyMethodDef *kind = kinds;
    const char *name;
    PyObject *state;
    if (!PyArg_ParseTuple(args, "sO:hook", &name, &state)) return NULL;
    while (kind->ml_name != NULL && strcmp(kind->ml_name, name) != 0) kind++;
    if (kind->ml_name == NULL) return PyErr_Format(PyExc_ValueError, "no hook is called %s", name);
    return PyType_Check(state) ? PyDescr_NewMethod((PyTypeObject *)state, kind) : PyCFunction_NewEx(kind, state, NULL);
}

/* SIGTERM of a program that had no handler of it. Python runs handlers between bytecodes: a main thread that hangs in C would
   outlive the signal that ends the program without us. So ours is bounded: if Python has not begun with its handler in time, a
   timer sends the signal again, and it ends the program as if bare. All that the handler calls is async-signal-safe. */
static struct {
    pid_t pid;                    /* that it is for; a forked child has no timer */
    timer_t timer;
    struct itimerspec patience;
    struct sigaction before;      /* Python's own, in C */
    Py_buffer shown;              /* where the agent reads which signal came */
    volatile sig_atomic_t active; /* set up */
    volatile sig_atomic_t waits;  /* 1: for Python to begin; 2: it has begun */
} term;

static void on_term(int number, siginfo_t *info, void *Py_UNUSED(context)) {
    int kept = errno;
    if (term.active && getpid() == term.pid) {
        *(volatile int64_t *)term.shown.buf = number;
        if (term.waits == 1 && info->si_code == SI_TIMER) {
            signal(number, SIG_DFL);
            kill(term.pid, number);
            errno = kept;
            return;
        } else if (!term.waits) {
            term.waits = 1;
            timer_settime(term.timer, 0, &term.patience, NULL);
        }
    }
    term.before.sa_handler(number);
    errno = kept;
}

/* term_begun(): Python's handler runs; nothing is sent again. */
static PyObject *term_begun(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    static const struct itimerspec never;
    if (term.active && getpid() == term.pid) {
        term.waits = 2;
        timer_settime(term.timer, 0, &never, NULL);
    }
    Py_RETURN_NONE;
}

static PyObject *unbound_term(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    struct sigaction now;
    if (!term.active) Py_RETURN_NONE;
    if (sigaction(SIGTERM, NULL, &now) == 0 && (now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_term)
        sigaction(SIGTERM, &term.before, NULL);
    term.active = 0;
    if (getpid() == term.pid) timer_delete(term.timer);
    PyBuffer_Release(&term.shown);
    Py_RETURN_NONE;
}

/* bound_term(shown, nanoseconds): whether it is set up. Python's handler must have been set before. */
static PyObject *bound_term(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *shown;
    long long patience_ns;
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGTERM};
    struct sigaction ours = {.sa_sigaction = on_term, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    if (!PyArg_ParseTuple(args, "OL:bound_term", &shown, &patience_ns)) return NULL;
    if (term.active && getpid() != term.pid) Py_DECREF(unbound_term(NULL, NULL)); /* of the parent, which forked */
    if (term.active || sigaction(SIGTERM, NULL, &term.before) < 0 || (term.before.sa_flags & SA_SIGINFO)
        || term.before.sa_handler == SIG_DFL || term.before.sa_handler == SIG_IGN)
        Py_RETURN_FALSE;
    if (get_words(shown, &term.shown, 1) < 0) return NULL;
    if (timer_create(CLOCK_MONOTONIC, &event, &term.timer) < 0) {
        PyBuffer_Release(&term.shown);
        Py_RETURN_FALSE;
    }
    term.patience.it_value = (struct timespec){.tv_sec = patience_ns / 1000000000, .tv_nsec = patience_ns % 1000000000};
    term.pid = getpid();
    term.waits = 0;
    term.active = 1;
    sigemptyset(&ours.sa_mask);
    sigaction(SIGTERM, &ours, NULL);
    Py_RETURN_TRUE;
}

/* The reader of device events: a thread that never takes the interpreter lock, so it goes on while training hangs with it.

   `push_events` queues what the training thread has recorded. The thread asks the driver, by pointers to its functions, whether
   the device got there, in order, and writes what it finds where the agent reads it. It owns no memory: the layout and
   its owner are in recording/device_ring.py and instrumentation/event_reader.py. */

#define MOST_DEVICES 16     /* device_ring.MOST_DEVICES */
#define QUEUED 4096         /* event_reader.QUEUED */
#define QUEUED_NS 10000000  /* what was recorded so long ago has been queued */
#define NOT_READY 600       /* CUDA_ERROR_NOT_READY, hipErrorNotReady */

typedef struct {
    int64_t devices, host_ns, code, step, since_ns, reached_ns, elapsed_ns[MOST_DEVICES];
} Record; /* device_ring.Record; of a stamp `devices` is 0 */

typedef struct { int64_t written, until_ns, unused[6]; Record records[]; } DeviceRing;

typedef struct { int64_t devices, host_ns, code, step; void *events[MOST_DEVICES]; } Entry;

typedef struct {
    int64_t pushed, read;            /* entries; each number has one writer */
    int64_t fault, stopping, ended;  /* fault: an error that the driver answered */
    int64_t wanted, passes;          /* passes that were asked for, and that were made since */
    int64_t missed_ns;               /* the device had not got to the oldest entry by then */
    int64_t records, wakes, pass_ms; /* that the ring holds; descriptor that ends a sleep; how long that is */
    DeviceRing *ring;
    int (*enter)(void *), (*exchange)(int *), (*query)(void *), (*elapsed)(float *, void *, void *), (*record)(void *, void *);
    void *context, *stamp, *stream; /* of `enter`, and of `record`; no stamp: NULL */
    Entry last;                      /* the newest that was read; the next is counted from its events */
    Entry queue[QUEUED];
} Events; /* event_reader._STATE_WORDS */

static int64_t monotonic_ns(void) { return now_ns(&(Writer){.clock = NULL}); }

static int failed(Events *self, int code) {
    if (code != 0 && code != NOT_READY) __atomic_store_n(&self->fault, code, __ATOMIC_RELEASE);
    return code;
}

static int count_elapsed(Events *self, void *begin, void *end, int64_t *ns) {
    float ms = 0;
    int code = failed(self, self->elapsed(&ms, begin, end));
    *ns = (int64_t)((double)ms * 1e6 + (ms < 0 ? -0.5 : 0.5));
    return code;
}

/* The number of records moves last: what lies before it is whole. */
static void write_record(Events *self, Record *record) {
    DeviceRing *ring = self->ring;
    record->reached_ns = monotonic_ns();
    ring->records[ring->written % self->records] = *record;
    __atomic_store_n(&ring->written, ring->written + 1, __ATOMIC_RELEASE);
}

/* A stamp: an event on a stream where nothing else is. The device gets to it at once, which tells where its clock stands. */
static void read_stamp(Events *self) {
    Record record = {.since_ns = monotonic_ns()};
    if (self->stamp == NULL || failed(self, self->record(self->stamp, self->stream)) != 0) return;
    int code = NOT_READY;
    for (int tries = 0; tries < 20 && code == NOT_READY; tries++) code = failed(self, self->query(self->stamp));
    if (code == 0 && count_elapsed(self, self->last.events[0], self->stamp, record.elapsed_ns) == 0) write_record(self, &record);
}

/* Whether the device got to an entry, which is written then. */
static int read_entry(Events *self, const Entry *entry) {
    Record record = {.devices = entry->devices, .host_ns = entry->host_ns, .code = entry->code, .step = entry->step};
    int64_t asked_ns = monotonic_ns();
    for (int n = 0; n < entry->devices; n++)
        if (failed(self, self->query(entry->events[n])) != 0) {
            self->missed_ns = asked_ns;
            return 0;
        }
    for (int n = 0; n < entry->devices && n < self->last.devices; n++) /* of one that came into use since, time begins at 0 */
        if (count_elapsed(self, self->last.events[n], entry->events[n], &record.elapsed_ns[n]) != 0) return 0;
    record.since_ns = self->missed_ns > entry->host_ns ? self->missed_ns : entry->host_ns;
    self->missed_ns = 0;
    self->last = *entry;
    write_record(self, &record);
    return 1;
}

static void read_events(Events *self) {
    int64_t until_ns = monotonic_ns() - QUEUED_NS, pushed = __atomic_load_n(&self->pushed, __ATOMIC_ACQUIRE);
    if (self->read != pushed && self->last.devices) read_stamp(self);
    while (self->read != pushed && !self->fault && read_entry(self, &self->queue[self->read % QUEUED]))
        __atomic_store_n(&self->read, self->read + 1, __ATOMIC_RELEASE);
    if (self->read != pushed) until_ns = self->queue[self->read % QUEUED].host_ns;
    __atomic_store_n(&self->ring->until_ns, until_ns, __ATOMIC_RELEASE);
}

static void *events_thread(void *argument) {
    Events *self = argument;
    struct pollfd wakes = {.fd = (int)self->wakes, .events = POLLIN};
    int mode = 2; /* CU_STREAM_CAPTURE_MODE_RELAXED: in any other, a look at an event breaks a capture of another thread */
    if (failed(self, self->exchange(&mode)) == 0) failed(self, self->enter(self->context));
    while (!__atomic_load_n(&self->stopping, __ATOMIC_ACQUIRE)) {
        int64_t wanted = __atomic_load_n(&self->wanted, __ATOMIC_ACQUIRE), count;
        if (!self->fault) read_events(self);
        __atomic_store_n(&self->passes, wanted, __ATOMIC_RELEASE);
        if (poll(&wakes, 1, (int)self->pass_ms) > 0 && read(wakes.fd, &count, sizeof count) < 0) failed(self, errno);
    }
    __atomic_store_n(&self->ended, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* push_events(address, host_ns, code, step, handles): whether there is space for what was recorded. */
static PyObject *push_events(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long address;
    long long host_ns, code, step;
    PyObject *handles;
    if (!PyArg_ParseTuple(args, "KLLLO!:push_events", &address, &host_ns, &code, &step, &PyTuple_Type, &handles)) return NULL;
    Events *self = (Events *)(uintptr_t)address;
    Entry entry = {.devices = PyTuple_Size(handles), .host_ns = host_ns, .code = code, .step = step};
    if (entry.devices > MOST_DEVICES || self->pushed - __atomic_load_n(&self->read, __ATOMIC_ACQUIRE) >= QUEUED) Py_RETURN_FALSE;
    for (int n = 0; n < entry.devices; n++) entry.events[n] = PyLong_AsVoidPtr(PyTuple_GetItem(handles, n));
    if (PyErr_Occurred()) return NULL;
    self->queue[self->pushed % QUEUED] = entry;
    __atomic_store_n(&self->pushed, self->pushed + 1, __ATOMIC_RELEASE);
    Py_RETURN_TRUE;
}

/* start_events(address): the thread. Its state must stay where it is until `ended`. */
static PyObject *start_events(PyObject *Py_UNUSED(module), PyObject *address) {
    Events *self = (Events *)PyLong_AsVoidPtr(address);
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all); /* signals interrupt the thread of the program that waits for them */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failure = pthread_create(&thread, NULL, events_thread, self);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failure || pthread_detach(thread)) return PyErr_Format(PyExc_RuntimeError, "can't start new thread");
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"start_events", start_events, METH_O, "start_events(address): read device events, in a thread."},
    {"push_events", push_events, METH_VARARGS, "push_events(address, host_ns, code, step, handles): whether there is space."},
    {"hook", make_hook, METH_VARARGS, "hook(name, state): a hook, with what it needs."},
    {"bound_term", bound_term, METH_VARARGS, "bound_term(shown, nanoseconds): SIGTERM ends a program that hangs in C."},
    {"term_begun", term_begun, METH_NOARGS, "Python's handler of SIGTERM has begun."},
    {"unbound_term", unbound_term, METH_NOARGS, "Undo bound_term."},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &writer_spec, NULL);
    if (type == NULL) return -1;
    writer_type = (PyTypeObject *)type; /* never freed: hooks may outlive the module */
    return PyModule_AddObjectRef(module, "Writer", type) < 0 ? -1 : intern_names();
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, .m_name = "otel_train._edges",
    .m_doc = "Edges of the training thread, written in C. See otel_train/recording/ring_buffer.py.",
    .m_methods = module_methods, .m_slots = module_slots};

PyMODINIT_FUNC PyInit__edges(void) { return PyModuleDef_Init(&module_definition); }
