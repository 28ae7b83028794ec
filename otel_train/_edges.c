/* Writer of events, hooks of the training thread, and the handler of SIGTERM. All but that handler runs with the GIL held.
   If this extension was not built, otel_train does the same in Python. An edge is an event: a code and a time.
   One writer belongs to one ring. Its owner is the only thread that writes; codes of other threads go to
   `on_other_thread`. Only the stable ABI of Python 3.11 is used, so one build serves every later version.
   No Py_RETURN_NONE: with the headers of Python 3.12 and 3.13 it takes no reference, which crashes Python 3.11. */

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#if Py_LIMITED_API < 0x030C0000 /* every version since 3.9 has these; the stable ABI contains them since 3.12 */
#define Py_TPFLAGS_HAVE_VECTORCALL (1UL << 11)
#define PY_VECTORCALL_ARGUMENTS_OFFSET ((size_t)1 << (8 * sizeof(size_t) - 1))
PyAPI_FUNC(PyObject *) PyObject_Vectorcall(PyObject *, PyObject *const *, size_t, PyObject *);
PyAPI_FUNC(PyObject *) PyVectorcall_Call(PyObject *, PyObject *, PyObject *);
#endif
#if PY_VERSION_HEX >= 0x030F0000 /* the headers of 3.15 lack it; the stable ABI keeps it */
PyAPI_FUNC(PyObject *) PyWeakref_GetObject(PyObject *);
#endif

#define INTERFACE 7         /* ring_buffer.INTERFACE: version of the arguments that Python passes to this module */
#define EDGE_WORDS 2        /* events.EDGE_WORDS: code, then time */
#define SAMPLED 61          /* ring_buffer.SAMPLED */
#define COST_OF_SAMPLE 12   /* ring_buffer.COST_OF_SAMPLE */
#define MOST_OF_FASTEST 4   /* ring_buffer.MOST_OF_FASTEST */
#define FASTEST_NS 25       /* ring_buffer.FASTEST_NS */
#define FIRST_SAMPLE_NS 250 /* ring_buffer.FIRST_SAMPLE_NS */
#define PAYLOAD_SHIFT 20    /* events.PAYLOAD_SHIFT */
#define MAX_PAYLOAD (((int64_t)1 << 43) - 1) /* events.MAX_PAYLOAD */
#define CLOSURE (8 << 16)   /* events.Flag.CLOSURE << events.FLAG_SHIFT */
#define THIS_THREAD ((unsigned long)pthread_self()) /* what threading.get_ident() gives */

typedef struct {
    PyObject_HEAD
    Py_buffer buffer;     /* the ring; buffer.obj is NULL once the memory is released */
    Py_buffer progress;   /* for readers in other processes; obj is NULL once released, or without such readers */
    int64_t *words;       /* memory of `buffer`; NULL once released */
    int64_t *shown;       /* memory of `progress`: words written, nanoseconds spent */
    uint64_t mask;        /* number of words - 1 */
    int64_t position;     /* words written in all */
    int64_t spent_ns;     /* cost of recording at the timed edges: times SAMPLED for all edges */
    int64_t fastest_ns;   /* shortest of the timed edges */
    unsigned long owner;  /* identity of the thread that may write; 0 for none */
    PyObject *on_other_thread;  /* called with the codes of all other threads */
    PyObject *clock;      /* NULL: the system's monotonic clock */
} Writer;

static int64_t system_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Value of a Python integer, whose reference is taken over; -1 with an exception set if it is NULL or no integer. */
static int64_t taken(PyObject *number) {
    int64_t value = number == NULL ? -1 : PyLong_AsLongLong(number);
    Py_XDECREF(number);
    return value;
}

/* Now; -1 with an exception set if the clock is a Python callable and raises. */
static int64_t now_ns(const Writer *self) {
    return self->clock == NULL ? system_ns() : taken(PyObject_CallNoArgs(self->clock));
}

/* Get aligned writable memory of at least `least` words; -1 with an exception set if it is smaller. */
static int get_words(PyObject *memory, Py_buffer *buffer, Py_ssize_t least) {
    if (PyObject_GetBuffer(memory, buffer, PyBUF_SIMPLE | PyBUF_WRITABLE) < 0) return -1;
    if (buffer->len >= least * (Py_ssize_t)sizeof(int64_t) && (uintptr_t)buffer->buf % sizeof(int64_t) == 0) return 0;
    PyErr_Format(PyExc_ValueError, "memory of %zd bytes: expected at least %zd words, aligned", buffer->len, least);
    PyBuffer_Release(buffer);
    return -1;
}

#define FAILED(ns) ((ns) == -1 && PyErr_Occurred())
#define IS_SAMPLE(self) ((uint64_t)(self)->position % (SAMPLED * EDGE_WORDS) == 0)

/* Write one edge; -1 with an exception set on failure. The position is published last: all edges before it are complete. `begun`
   is the time at which the calling hook began if this edge is timed, else 0. */
static int write_edge(Writer *self, int64_t word, int64_t begun) {
    if (THIS_THREAD != self->owner) {
        PyObject *other = PyObject_CallFunction(self->on_other_thread, "L", (long long)word);
        Py_XDECREF(other);
        return other == NULL ? -1 : 0;
    }
    uint64_t slot = (uint64_t)self->position & self->mask;
    int sample = IS_SAMPLE(self);
    int64_t ns;
    if (sample && !begun && FAILED(begun = now_ns(self))) return -1;
    if (FAILED(ns = now_ns(self))) return -1;
    if (self->words == NULL) return 0; /* released while a clock in Python ran */
    self->words[slot] = word;
    __atomic_store_n(&self->words[slot + 1], ns, __ATOMIC_RELEASE); /* a new time means a complete edge */
    __atomic_store_n(&self->position, self->position + EDGE_WORDS, __ATOMIC_RELEASE);
    if (self->shown != NULL) __atomic_store_n(&self->shown[0], self->position, __ATOMIC_RELEASE);
    if (sample) {
        int64_t ended = now_ns(self);
        if (FAILED(ended)) return -1;
        if (ended - begun < self->fastest_ns) self->fastest_ns = ended - begun > FASTEST_NS ? ended - begun : FASTEST_NS;
        int64_t most = MOST_OF_FASTEST * self->fastest_ns;
        self->spent_ns += COST_OF_SAMPLE * (ended - begun < most ? ended - begun : most);
        if (self->shown != NULL) self->shown[1] = self->spent_ns;
    }
    return 0;
}

static PyObject *writer_edge(PyObject *object, PyObject *code) {
    int64_t word = PyLong_AsLongLong(code);
    if (FAILED(word) || write_edge((Writer *)object, word, 0) < 0) return NULL;
    return Py_NewRef(Py_None);
}

static PyObject *writer_read(PyObject *object, PyObject *Py_UNUSED(none)) {
    return Py_BuildValue("LL", (long long)((Writer *)object)->position, (long long)((Writer *)object)->spent_ns);
}

static PyObject *writer_detach(PyObject *object, PyObject *Py_UNUSED(none)) {
    Writer *self = (Writer *)object;
    self->owner = 0;
    self->words = self->shown = NULL;
    if (self->buffer.obj != NULL) PyBuffer_Release(&self->buffer);
    if (self->progress.obj != NULL) PyBuffer_Release(&self->progress);
    return Py_NewRef(Py_None);
}

static PyObject *writer_set_owner(PyObject *object, PyObject *args) {
    Writer *self = (Writer *)object;
    unsigned long to;
    PyObject *others, *before = self->on_other_thread;
    if (!PyArg_ParseTuple(args, "kO:set_owner", &to, &others)) return NULL;
    self->owner = self->words == NULL ? 0 : to;
    self->on_other_thread = Py_NewRef(others);
    Py_XDECREF(before);
    return Py_NewRef(Py_None);
}

static PyObject *writer_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *words, *clock, *on_other_thread, *progress = Py_None;
    unsigned long owner;
    if (!PyArg_ParseTuple(args, "OOkO|O:Writer", &words, &clock, &owner, &on_other_thread, &progress)) return NULL;
    Writer *self = (Writer *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) return NULL;
    int bad = get_words(words, &self->buffer, EDGE_WORDS) < 0 || (progress != Py_None && get_words(progress, &self->progress, 2) < 0);
    self->mask = (uint64_t)self->buffer.len / sizeof(int64_t) - 1;
    if (!bad && (bad = ((self->mask + 1) & self->mask) != 0))
        PyErr_Format(PyExc_ValueError, "ring of %llu words: expected a power of two", (unsigned long long)self->mask + 1);
    self->words = self->buffer.buf;
    self->shown = self->progress.buf;
    self->fastest_ns = FIRST_SAMPLE_NS;
    self->owner = owner;
    self->on_other_thread = Py_NewRef(on_other_thread);
    self->clock = clock == Py_None ? NULL : Py_NewRef(clock);
    if (bad) Py_CLEAR(self);
    return (PyObject *)self;
}

/* The buffer is not visited: the owner of the memory does not refer to this object, and releasing a memoryview that the
   collector has cleared crashes the interpreter. */
static int writer_traverse(PyObject *object, visitproc visit, void *arg) {
    Writer *self = (Writer *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->on_other_thread);
    Py_VISIT(self->clock);
    return 0;
}

/* Another object of the same cycle may still write an edge: `on_other_thread` stays, and the recorder breaks the cycle. */
static int writer_clear(PyObject *object) {
    Py_CLEAR(((Writer *)object)->clock);
    return 0;
}

static void writer_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    Py_DECREF(writer_detach(object, NULL));
    Py_CLEAR(((Writer *)object)->clock);
    Py_CLEAR(((Writer *)object)->on_other_thread);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef writer_methods[] = {
    {"edge", writer_edge, METH_O, "Write one edge: a code, and now."},
    {"read", writer_read, METH_NOARGS, "Words written in all, and nanoseconds that recording took per timed edge."},
    {"detach", writer_detach, METH_NOARGS, "Write no more, and give the memory back."},
    {"set_owner", writer_set_owner, METH_VARARGS, "set_owner(owner, on_other_thread): another owner, 0 for none."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot writer_slots[] = {
    {Py_tp_doc, "Writer(words, clock, owner, on_other_thread, progress=None): clock None is the system's."},
    {Py_tp_new, writer_new},
    {Py_tp_traverse, writer_traverse},
    {Py_tp_clear, writer_clear},
    {Py_tp_dealloc, writer_dealloc},
    {Py_tp_methods, writer_methods},
    {0, NULL},
};

static PyType_Spec writer_spec = {
    .name = "otel_train._edges.Writer", .basicsize = sizeof(Writer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, .slots = writer_slots};

/* Hooks: functions that torch calls or that replace functions of torch. Their versions in Python are in otel_train/instrumentation.
   Torch's work between two hooks evicts the processor's caches, so each function of the interpreter that a hook calls costs much
   more than its instructions. Therefore hooks use the vectorcall protocol, and have what they need as fields. */
typedef struct Hook {
    PyObject_HEAD
    PyObject *(*call)(struct Hook *, PyObject *const *, size_t, PyObject *); /* the vectorcall function: the kind of the hook */
    PyObject *state;      /* a tuple, which owns the objects in the fields below: `edge` first, a callable that takes a code */
    Writer *writer;       /* if `edge` is a method of a writer; else NULL */
    PyObject *field[9];   /* first items of the tuple */
    const int64_t *words; /* codes, packed in a bytes object: the last item of the tuple */
    PyObject *latest;     /* weak reference; `update`: to the optimizer that `words` are of; `forward`: to the wrapper */
    lenfunc length;       /* `leading`: returns the first dimension of a tensor */
    int64_t ask;          /* `batch`: the code that begins a wait for data */
    int64_t references;   /* `forward`: references to the wrapper during a call, if no copy of the module has it */
} Hook;

#define COUNT(given) ((Py_ssize_t)((given) & ~PY_VECTORCALL_ARGUMENTS_OFFSET))
enum { NEXT, SIZE, TRAINING, SHAPE, COMPILING, NAMES };
static PyObject *names[NAMES]; /* interned */
static PyTypeObject *hook_type;

/* Now if the next edge is timed, so that the time of the hook before or after the program's own call is counted; else 0. */
static int64_t hook_begins(const Hook *self) {
    return self->writer && self->writer->clock == NULL && IS_SAMPLE(self->writer) ? now_ns(self->writer) : 0;
}

static int put(const Hook *self, int64_t word, int64_t begun) {
    if (self->writer != NULL) return write_edge(self->writer, word, begun);
    PyObject *done = PyObject_CallFunction(self->field[0], "L", (long long)word);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Write words[0], or words[1] if there is no result: the exception that is set stays, also if the edge fails. */
static PyObject *finish(const Hook *self, PyObject *result) {
    PyObject *type, *value, *traceback;
    if (result != NULL) {
        if (put(self, self->words[0], 0) < 0) Py_CLEAR(result);
        return result;
    }
    PyErr_Fetch(&type, &value, &traceback);
    put(self, self->words[1], 0);
    PyErr_Restore(type, value, traceback);
    return NULL;
}

/* State: edge, call, when, otherwise, (end, fail, begin). Call `call`, timed, if the keyword `when` is True; else `otherwise`. */
static PyObject *timed(Hook *self, PyObject *const *args, size_t given, PyObject *keywords) {
    int64_t begun = hook_begins(self);
    Py_ssize_t place = 0, named = keywords == NULL ? 0 : PyTuple_Size(keywords);
    while (place < named && PyTuple_GetItem(keywords, place) != self->field[2]) place++; /* both are interned */
    if (place == named || args[COUNT(given) + place] != Py_True) return PyObject_Vectorcall(self->field[3], args, given, keywords);
    if (put(self, self->words[2], begun) < 0) return NULL;
    return finish(self, PyObject_Vectorcall(self->field[1], args, given, keywords));
}

/* call(*args, **kwargs), with `first` before them unless it is NULL. */
static PyObject *call_with(PyObject *call, PyObject *first, PyObject *args, PyObject *kwargs) {
    PyObject *few[6] = {NULL, first}, *head, *all, *result;
    Py_ssize_t own = first != NULL, count = PyTuple_Size(args);
    if (count <= 4 && PyDict_Size(kwargs) == 0) {
        for (Py_ssize_t place = 0; place < count; place++) few[1 + own + place] = PyTuple_GetItem(args, place);
        return PyObject_Vectorcall(call, few + 1, (size_t)(own + count) | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    }
    head = PyTuple_Pack(own, first);
    all = head == NULL ? NULL : PySequence_Concat(head, args);
    result = all == NULL ? NULL : PyObject_Call(call, all, kwargs);
    Py_XDECREF(head), Py_XDECREF(all);
    return result;
}

/* Number of references to the referent of `weakly`; UINT32_MAX if that is no weak reference. Python 3.14 has flags in the high bits. */
static int64_t references_to(PyObject *weakly) {
    PyObject *to = weakly == NULL || weakly == Py_None ? NULL : PyWeakref_GetObject(weakly);
    return to == NULL ? UINT32_MAX : (uint32_t)Py_REFCNT(to);
}

static PyObject *references(PyObject *Py_UNUSED(module), PyObject *weakly) {
    int64_t count = references_to(weakly);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(count);
}

/* State: edge, call, bare, open_in, is_grad_enabled, task, type, compiler, instead, (end, fail, and begins by flags).
   forward(bound, args, kwargs). `bound` is a weak reference to the model, the first argument of `call` unless `bare`. If `bound` is
   not of `type`, or there are more references to the wrapper than in a call of its own module, a copy may have been called:
   `instead(bound, call or None)` returns the function that calls it, or None. Called without events: a model whose `bound` is not
   of `type`; one that is exported (a flag in `compiler`); a part in an open forward, or in a backward, where `task()` is not -1.
   `task` is None for a root. */
static PyObject *forward(Hook *self, PyObject *const *given, size_t count, PyObject *Py_UNUSED(keywords)) {
    if (COUNT(count) != 3) return PyErr_Format(PyExc_TypeError, "forward: expected 3 arguments");
    if ((PyObject *)Py_TYPE(given[0]) != self->field[6] || references_to(self->latest) > self->references) {
        PyObject *bare = self->field[2] == Py_True ? self->field[1] : Py_None, *called = NULL;
        PyObject *instead = PyObject_CallFunctionObjArgs(self->field[8], given[0], bare, NULL);
        if (instead != Py_None) {
            if (instead != NULL) called = PyObject_CallFunctionObjArgs(instead, given[1], given[2], NULL);
            Py_XDECREF(instead);
            return called;
        }
        Py_DECREF(instead);
    }
    PyObject *model = Py_XNewRef(PyWeakref_GetObject(given[0])), *task_of = self->field[5], *result = NULL;
    if (model == NULL) return NULL;
    volatile unsigned long *open_in = (unsigned long *)PyByteArray_AsString(self->field[3]), here = THIS_THREAD;
    int64_t begun = hook_begins(self);
    int inside = *open_in == here, records = task_of == Py_None || !inside;
    if (records && (PyObject *)Py_TYPE(given[0]) != self->field[6]) records = 0;
    if (records && PyDict_GetItemWithError(self->field[7], names[COMPILING]) == Py_True) records = 0;
    if (records && task_of != Py_None) records = taken(PyObject_CallNoArgs(task_of)) != -1 ? 0 : PyErr_Occurred() ? -1 : 1;
    if (records > 0) {
        PyObject *training = PyObject_GetAttr(model, names[TRAINING]), *grad = NULL;
        int trains = training == Py_True ? 1 : training == NULL ? -1 : PyObject_IsTrue(training);
        if (trains < 0 && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear(), trains = 1; /* it is a property of the program */
        if (trains >= 0) grad = PyObject_CallNoArgs(self->field[4]);
        Py_XDECREF(training), Py_XDECREF(grad); /* the latter is a bool, and lives on */
        if (grad == NULL || put(self, self->words[2 + 2 * trains + (grad == Py_True)], begun) < 0) records = -1;
        else if (!inside) *open_in = here;
    }
    if (records >= 0) result = call_with(self->field[1], self->field[2] == Py_True ? NULL : model, given[1], given[2]);
    Py_DECREF(model);
    if (records > 0 && !inside) *open_in = 0; /* never back to another thread, whose forward may have ended */
    return records > 0 ? finish(self, result) : result;
}

/* Whether an optimizer's step was given a closure; the first item of `args` is the optimizer. */
static int has_closure(PyObject *args, PyObject *kwargs) {
    if (PyTuple_Check(args) && PyTuple_Size(args) > 1) return 1;
    return PyDict_Check(kwargs) && PyDict_Size(kwargs) > 0 && PyDict_GetItemString(kwargs, "closure") != NULL;
}

/* State: edge, a dict from id(optimizer) to packed (begin, end, fail), register. update(optimizer, args, kwargs). `register` returns
   the words of a new optimizer, or None; it is None in the hook after the step. */
static PyObject *update(Hook *self, PyObject *const *given, size_t count, PyObject *Py_UNUSED(keywords)) {
    int64_t begun = hook_begins(self);
    if (COUNT(count) == 0) return PyErr_Format(PyExc_TypeError, "update: expected an optimizer");
    if (self->latest == NULL || PyWeakref_GetObject(self->latest) != given[0]) {
        PyObject *register_new = self->field[2], *key = PyLong_FromVoidPtr(given[0]);
        PyObject *words = key == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(self->field[1], key));
        Py_XDECREF(key);
        if (words == NULL && !PyErr_Occurred() && register_new != Py_None) words = PyObject_CallFunctionObjArgs(register_new, given[0], NULL);
        if (words == Py_None) Py_CLEAR(words); /* it failed */
        PyObject *latest = words == NULL ? NULL : PyWeakref_NewRef(given[0], NULL);
        PyObject *before = self->latest; /* only now: while `register` ran, another thread may have replaced it */
        self->latest = latest;
        if (latest != NULL) self->words = (const int64_t *)PyBytes_AsString(words);
        Py_XDECREF(before), Py_XDECREF(words); /* the dict has them as long as the optimizer lives */
        if (latest == NULL) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    }
    int ends = self->field[2] == Py_None;
    int64_t closure = ends || COUNT(count) != 3 || !has_closure(given[1], given[2]) ? 0 : CLOSURE;
    return put(self, self->words[ends] | closure, begun) < 0 ? NULL : Py_NewRef(Py_None);
}

/* State: None, key, and if torch is loaded tensor, base. leading(batch): the length of `batch[key]` along its first dimension, plus
   one; 0 if it has none. For objects of type `tensor`, the `len` of `base` creates no torch.Size; it is 0 also without dimensions. */
static PyObject *leading(Hook *self, PyObject *const *given, size_t count, PyObject *Py_UNUSED(keywords)) {
    PyObject *array = COUNT(count) == 1 ? PyObject_GetItem(given[0], self->field[1]) : NULL, *shape = NULL;
    int of_tensor = array != NULL && self->length != NULL && (PyObject *)Py_TYPE(array) == self->field[2];
    int64_t length = array == NULL ? -1 : of_tensor ? self->length(array) : 0;
    if (length == 0) {
        shape = PyObject_GetAttr(array, names[SHAPE]);
        length = shape == NULL ? -1 : taken(PySequence_GetItem(shape, 0));
    }
    Py_XDECREF(array), Py_XDECREF(shape);
    if (FAILED(length) && !PyErr_ExceptionMatches(PyExc_Exception)) return NULL;
    PyErr_Clear();
    return PyLong_FromLongLong(length >= 0 && length < MAX_PAYLOAD ? length + 1 : 0);
}

/* State: edge, `__next__` of the iterator's type, probe, its attributes, (the code that ends a wait for data). batch(iterator). */
static PyObject *batch(Hook *self, PyObject *const *given, size_t count, PyObject *Py_UNUSED(keywords)) {
    int64_t begun = hook_begins(self);
    if (COUNT(count) != 1) return PyErr_Format(PyExc_TypeError, "batch: expected an iterator");
    if (put(self, self->ask, begun) < 0) return NULL;
    PyObject *made = PyObject_Vectorcall(self->field[1], given, 1, NULL), *type, *value, *traceback;
    if (made != NULL) {
        begun = hook_begins(self);
        PyObject *read = Py_XNewRef(PyDict_GetItemWithError(self->field[3], names[SIZE]));
        int64_t samples = read == NULL ? -1 : taken(PyObject_Vectorcall(read, &made, 1, NULL));
        Py_XDECREF(read);
        if (FAILED(samples) || put(self, self->words[0] | samples << PAYLOAD_SHIFT, begun) < 0) Py_CLEAR(made);
        return made;
    }
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    int64_t word = taken(PyObject_CallMethod(self->field[2], "raised", "OO", given[0], value));
    if (!FAILED(word)) put(self, word, 0);
    PyErr_Restore(type, value, traceback);
    return NULL;
}

/* `__next__` of a loader's iterator, whose `__dict__` has its hook. */
static PyObject *next_batch(PyObject *iterator, PyObject *Py_UNUSED(none)) {
    PyObject *about = PyObject_GenericGetDict(iterator, NULL), *result = NULL;
    PyObject *hook = about == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(about, names[NEXT]));
    Py_XDECREF(about);
    if (hook != NULL) result = batch((Hook *)hook, &iterator, 1, NULL);
    else if (!PyErr_Occurred()) /* the session has ended, and the program has kept this bound method */
        result = PyObject_CallMethod(iterator, "__next__", NULL);
    Py_XDECREF(hook);
    return result;
}

static int hook_traverse(PyObject *object, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((Hook *)object)->state); /* a weak reference without a callback has nothing to visit */
    return 0;
}

static void hook_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    Py_XDECREF(((Hook *)object)->state);
    Py_XDECREF(((Hook *)object)->latest);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* There is no tp_clear: another object of the same cycle may still call the hook. Those objects break the cycle. */
static PyMemberDef hook_members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(Hook, call), READONLY, NULL},
                                     {"ask", T_LONGLONG, offsetof(Hook, ask), 0, NULL},
                                     {"wrapper", T_OBJECT, offsetof(Hook, latest), 0, NULL},
                                     {"references", T_LONGLONG, offsetof(Hook, references), 0, NULL}, {0}};
static PyType_Slot hook_slots[] = {
    {Py_tp_call, PyVectorcall_Call}, {Py_tp_members, hook_members}, {Py_tp_traverse, hook_traverse}, {Py_tp_dealloc, hook_dealloc}, {0, NULL}};
static PyType_Spec hook_spec = {
    .name = "otel_train._edges.Hook", .basicsize = sizeof(Hook), .slots = hook_slots,
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION};

/* hook(name, state) returns a function; hook("__next__", type) a method descriptor of the type. */
static PyObject *make_hook(PyObject *Py_UNUSED(module), PyObject *args) {
    static PyMethodDef method = {"__next__", next_batch, METH_NOARGS, NULL};
    static const struct { const char *name; PyObject *(*call)(Hook *, PyObject *const *, size_t, PyObject *); } kinds[] = {
        {"timed", timed}, {"forward", forward}, {"update", update}, {"leading", leading}, {"batch", batch}, {NULL, NULL}};
    const char *name;
    PyObject *state;
    int kind = 0;
    if (!PyArg_ParseTuple(args, "sO:hook", &name, &state)) return NULL;
    if (PyType_Check(state)) return PyDescr_NewMethod((PyTypeObject *)state, &method);
    while (kinds[kind].name != NULL && strcmp(kinds[kind].name, name) != 0) kind++;
    if (kinds[kind].name == NULL || !PyTuple_Check(state)) return PyErr_Format(PyExc_ValueError, "no hook is called %s", name);
    Hook *self = (Hook *)((allocfunc)PyType_GetSlot(hook_type, Py_tp_alloc))(hook_type, 0);
    if (self == NULL) return NULL;
    self->call = kinds[kind].call;
    self->state = Py_NewRef(state);
    for (Py_ssize_t place = 0; place < PyTuple_Size(state); place++) {
        PyObject *item = PyTuple_GetItem(state, place);
        if (place < 9) self->field[place] = item;
        if (PyBytes_Check(item)) self->words = (const int64_t *)PyBytes_AsString(item);
    }
    if (self->call == leading && self->field[3] != NULL) self->length = (lenfunc)PyType_GetSlot((PyTypeObject *)self->field[3], Py_mp_length);
    if (PyCFunction_CheckExact(self->field[0]) && PyCFunction_GetFunction(self->field[0]) == writer_edge)
        self->writer = (Writer *)PyCFunction_GetSelf(self->field[0]);
    return (PyObject *)self;
}

/* SIGTERM. The handler writes the signal's number to memory that the agent reads, then calls the previous handler or does the
   default action, which ends the process at once, whatever its threads do. If the session has to be closed first, which Python does
   between bytecodes, Python must begin within `patience`: after that a timer sends the signal again, and the second one ends the
   process. All functions that the handler calls are async-signal-safe. */
static struct {
    pid_t pid;                    /* process that set the handler: a forked child writes nothing, and has no timer */
    int has_timer, has_successor; /* whether there is `timer`; whether there is a handler that still calls this one */
    timer_t timer;
    struct itimerspec patience;   /* all 0: no session has to be closed first */
    struct sigaction before, first; /* previous action; as it was when a handler that still calls this one was set */
    Py_buffer shown;              /* memory in which the agent reads the signal's number */
    volatile sig_atomic_t active; /* whether the handler is set */
    volatile sig_atomic_t waits;  /* 1: for Python's handler to begin; 2: it has begun */
} term;

static void end_by(int number) {
    signal(number, SIG_DFL);
    raise(number); /* delivered when the handler returns */
}

static void on_term(int number, siginfo_t *info, void *context) {
    static volatile unsigned long caller; /* thread in which this handler calls the previous one, which may call this one again */
    int kept = errno, mine = getpid() == term.pid, late = mine && term.waits == 1 && info->si_code == SI_TIMER;
    int closes = term.patience.it_value.tv_sec || term.patience.it_value.tv_nsec;
    int nested = caller == THIS_THREAD;
    const struct sigaction *next = nested ? &term.first : &term.before;
    caller = THIS_THREAD;
    if (term.active && mine) *(volatile int64_t *)term.shown.buf = number;
    if (term.active && closes && mine && !term.waits) term.waits = 1, timer_settime(term.timer, 0, &term.patience, NULL);
    if (term.active && closes && (late || !mine)) end_by(number);
    else if (next->sa_flags & SA_SIGINFO) next->sa_sigaction(number, info, context);
    else if (next->sa_handler != SIG_DFL) next->sa_handler(number);
    else if (!term.active || !closes) end_by(number); /* else Python's handler, which is about to be set, sees it in term_begun() */
    if (!nested) caller = 0;
    errno = kept;
}

/* term_begun(): Python's handler has begun, so the timer is stopped. Returns whether the signal had come and waited for this. */
static PyObject *term_begun(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    static const struct itimerspec never;
    int waited = term.active && getpid() == term.pid && term.waits == 1;
    if (waited) term.waits = 2, timer_settime(term.timer, 0, &never, NULL);
    return PyBool_FromLong(waited);
}

static int is_on_top(void) {
    struct sigaction now;
    return term.active && sigaction(SIGTERM, NULL, &now) == 0 && (now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_term;
}

static int is_default(void) {
    struct sigaction now;
    return sigaction(SIGTERM, NULL, &now) == 0 && !(now.sa_flags & SA_SIGINFO) && now.sa_handler == SIG_DFL;
}

static PyObject *unwatch_term(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    if (!term.active) return Py_NewRef(Py_None);
    if (!is_on_top()) term.has_successor = 1;
    else if (sigaction(SIGTERM, &term.before, NULL) == 0 && term.has_successor) term.before = term.first;
    term.active = 0;
    if (term.has_timer && getpid() == term.pid) timer_delete(term.timer);
    PyBuffer_Release(&term.shown);
    return Py_NewRef(Py_None);
}

/* watch_term(shown, patience_ns): set this handler, with this patience; returns whether it is set. Not if SIGTERM is ignored, and not
   after the program has set another handler over this one, until the default action is set again. */
static PyObject *watch_term(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *shown;
    long long patience_ns;
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGTERM};
    struct sigaction before, ours = {.sa_sigaction = on_term};
    if (!PyArg_ParseTuple(args, "OL:watch_term", &shown, &patience_ns)) return NULL;
    if (term.active && (getpid() != term.pid || is_default())) /* set by the parent before a fork, or replaced by the default action */
        Py_DECREF(unwatch_term(NULL, NULL));
    if (!term.active) {
        if (sigaction(SIGTERM, NULL, &before) < 0 || (before.sa_flags & SA_SIGINFO ? before.sa_sigaction == on_term
                                                                                 : before.sa_handler == SIG_IGN))
            return Py_NewRef(Py_False);
        if (get_words(shown, &term.shown, 1) < 0) return NULL;
        term.before = before;
        if (!term.has_successor) term.first = before;
        term.pid = getpid();
        term.has_timer = term.waits = 0;
        term.patience.it_value = (struct timespec){0};
        term.active = 1;
        ours.sa_flags = before.sa_flags | SA_SIGINFO | SA_ONSTACK;
        ours.sa_mask = before.sa_mask;
        sigaction(SIGTERM, &ours, NULL);
    }
    if (!is_on_top()) return Py_NewRef(Py_False);
    if (patience_ns && !term.has_timer) term.has_timer = timer_create(CLOCK_MONOTONIC, &event, &term.timer) == 0;
    if (!term.has_timer) patience_ns = 0;
    term.patience.it_value = (struct timespec){.tv_sec = patience_ns / 1000000000, .tv_nsec = patience_ns % 1000000000};
    return Py_NewRef(Py_True);
}

/* See _device_events.c. */
extern PyObject *start_events(PyObject *, PyObject *), *push_events(PyObject *, PyObject *);

static PyMethodDef module_methods[] = {
    {"start_events", start_events, METH_O, "start_events(address): read device events, in a thread."},
    {"push_events", push_events, METH_VARARGS, "push_events(address, host_ns, code, step, handles): whether there is space."},
    {"hook", make_hook, METH_VARARGS, "hook(name, state): a hook, with what it needs."},
    {"references", references, METH_O, "references(weakly): how many there are to what a weak reference refers to."},
    {"watch_term", watch_term, METH_VARARGS, "watch_term(shown, patience_ns): SIGTERM is written down, and ends what hangs in C."},
    {"term_begun", term_begun, METH_NOARGS, "Python's handler of SIGTERM has begun; whether it was waited for."},
    {"unwatch_term", unwatch_term, METH_NOARGS, "Undo watch_term."},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module) {
    static const char *const texts[NAMES] = {"_otel_train_next", "size", "training", "shape", "_is_compiling_flag"};
    for (int place = 0; place < NAMES; place++)
        if (names[place] == NULL && (names[place] = PyUnicode_InternFromString(texts[place])) == NULL) return -1;
    PyObject *writer = PyType_FromModuleAndSpec(module, &writer_spec, NULL);
    hook_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &hook_spec, NULL); /* never freed: it may outlive the module */
    int failed = writer == NULL || hook_type == NULL ? -1 : PyModule_AddObjectRef(module, "Writer", writer);
    if (!failed) failed = PyModule_AddIntConstant(module, "INTERFACE", INTERFACE);
    Py_XDECREF(writer);
    return failed;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, .m_name = "otel_train._edges",
    .m_doc = "Edges of the training thread, written in C. See otel_train/recording/ring_buffer.py.",
    .m_methods = module_methods, .m_slots = module_slots};

PyMODINIT_FUNC PyInit__edges(void) { return PyModuleDef_Init(&module_definition); }
