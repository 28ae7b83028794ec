/* The writer of a ring of edges, in C: the same as `_writer` in record/ring.py, at a third of its time or less.

   One writer belongs to one ring. Its owner is the only thread that writes; what other threads say goes to
   `elsewhere`. All of it runs with the interpreter lock held. The stable ABI of Python 3.11 is all that is used, so one
   build serves every later version. Where it was not built, ring.py does the same in Python. */

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <time.h>

#define EDGE_WORDS 2        /* codes.EDGE_WORDS: code, then time */
#define SAMPLED 64          /* ring.SAMPLED */
#define PREEMPTED_NS 100000 /* ring.PREEMPTED_NS */

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

#define FAILED(ns) ((ns) == -1 && PyErr_Occurred())

/* Write one edge. The position moves last: what lies before it is whole. */
static PyObject *writer_edge(PyObject *object, PyObject *code) {
    Writer *self = (Writer *)object;
    if (PyThread_get_thread_ident() != self->owner) {
        PyObject *other = PyObject_CallFunctionObjArgs(self->elsewhere, code, NULL);
        if (other == NULL) return NULL;
        Py_DECREF(other);
        Py_RETURN_NONE;
    }
    int64_t word = PyLong_AsLongLong(code);
    if (FAILED(word)) return NULL;
    uint64_t slot = (uint64_t)self->position & self->mask;
    int sample = (slot & (SAMPLED * EDGE_WORDS - 1)) == 0;
    int64_t begun = 0, ns;
    if (sample && FAILED(begun = now_ns(self))) return NULL;
    if (FAILED(ns = now_ns(self))) return NULL;
    if (self->words == NULL) Py_RETURN_NONE; /* given back while the program's clock was asked */
    self->words[slot] = word;
    __atomic_store_n(&self->words[slot + 1], ns, __ATOMIC_RELEASE); /* a new time means a whole edge */
    __atomic_store_n(&self->position, self->position + EDGE_WORDS, __ATOMIC_RELEASE);
    if (self->shown != NULL) __atomic_store_n(&self->shown[0], self->position, __ATOMIC_RELEASE);
    if (sample) {
        int64_t ended = now_ns(self);
        if (FAILED(ended)) return NULL;
        if (ended - begun < PREEMPTED_NS) self->spent_ns += ended - begun;
        if (self->shown != NULL) self->shown[1] = self->spent_ns;
    }
    Py_RETURN_NONE;
}

/* Words written in all, and nanoseconds that the timed edges took. */
static PyObject *writer_read(PyObject *object, PyObject *Py_UNUSED(none)) {
    Writer *self = (Writer *)object;
    return Py_BuildValue("LL", (long long)self->position, (long long)self->spent_ns);
}

static void give_back(Writer *self) {
    self->owner = 0;
    self->words = self->shown = NULL;
    if (self->buffer.obj != NULL) PyBuffer_Release(&self->buffer);
    if (self->progress.obj != NULL) PyBuffer_Release(&self->progress);
}

/* Write no more, and give the memory back. */
static PyObject *writer_disown(PyObject *object, PyObject *Py_UNUSED(none)) {
    give_back((Writer *)object);
    Py_RETURN_NONE;
}

/* Another owner, or none, and who takes the codes of all others. */
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
    if (PyObject_GetBuffer(words, &self->buffer, PyBUF_SIMPLE | PyBUF_WRITABLE) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    uint64_t count = (uint64_t)self->buffer.len / sizeof(int64_t);
    if (count < EDGE_WORDS || (count & (count - 1)) || (uintptr_t)self->buffer.buf % sizeof(int64_t)) {
        PyErr_Format(PyExc_ValueError, "ring of %llu words: expected a power of two, aligned", (unsigned long long)count);
        Py_DECREF(self);
        return NULL;
    }
    if (progress != Py_None) {
        if (PyObject_GetBuffer(progress, &self->progress, PyBUF_SIMPLE | PyBUF_WRITABLE) < 0) {
            Py_DECREF(self);
            return NULL;
        }
        if (self->progress.len < (Py_ssize_t)(2 * sizeof(int64_t)) || (uintptr_t)self->progress.buf % sizeof(int64_t)) {
            PyErr_SetString(PyExc_ValueError, "progress: expected two words, aligned");
            Py_DECREF(self);
            return NULL;
        }
        self->shown = self->progress.buf;
    }
    self->words = self->buffer.buf;
    self->mask = count - 1;
    self->owner = owner;
    self->elsewhere = Py_NewRef(elsewhere);
    self->clock = clock == Py_None ? NULL : Py_NewRef(clock);
    return (PyObject *)self;
}

/* The buffer is not visited: what holds the memory refers to nothing of ours, and a memoryview that the collector has
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
    give_back((Writer *)object);
    Py_CLEAR(((Writer *)object)->clock);
    Py_CLEAR(((Writer *)object)->elsewhere);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
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
    {Py_tp_traverse, writer_traverse},
    {Py_tp_clear, writer_clear},
    {Py_tp_dealloc, writer_dealloc},
    {Py_tp_methods, writer_methods},
    {0, NULL},
};

static PyType_Spec writer_spec = {
    .name = "otel_train._edges.Writer",
    .basicsize = sizeof(Writer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = writer_slots,
};

static int execute(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &writer_spec, NULL);
    if (type == NULL) return -1;
    int failed = PyModule_AddObjectRef(module, "Writer", type);
    Py_DECREF(type);
    return failed;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "otel_train._edges",
    .m_doc = "Edges of the training thread, written in C. See otel_train/record/ring.py.",
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__edges(void) { return PyModuleDef_Init(&module_definition); }
