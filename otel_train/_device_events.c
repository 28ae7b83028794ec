/* The reader of device events: a thread that never takes the interpreter lock, so it goes on while training hangs with it.

   `push_events` queues what the training thread has recorded. The thread asks the driver, by pointers to its functions, whether
   the device got there, in order, and writes what it finds where the agent reads it. It owns no memory: the layout and
   its owner are in recording/shared_memory.py and instrumentation/cuda_events.py. */

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
#include <time.h>
#include <unistd.h>

#define MOST_DEVICES 16     /* shared_memory.MOST_DEVICES */
#define QUEUED 4096         /* cuda_events.QUEUED */
#define QUEUED_NS 10000000  /* what was recorded so long ago has been queued */
#define NOT_READY 600       /* CUDA_ERROR_NOT_READY, hipErrorNotReady */

typedef struct {
    int64_t devices, host_ns, code, step, since_ns, reached_ns, elapsed_ns[MOST_DEVICES];
} Record; /* shared_memory.Record; of a stamp `devices` is 0 */

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
} Events; /* cuda_events._STATE_WORDS */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

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
    record->reached_ns = now_ns();
    ring->records[ring->written % self->records] = *record;
    __atomic_store_n(&ring->written, ring->written + 1, __ATOMIC_RELEASE);
}

/* A stamp: an event on a stream where nothing else is. The device gets to it at once, which tells where its clock stands. */
static void read_stamp(Events *self) {
    Record record = {.since_ns = now_ns()};
    if (self->stamp == NULL || failed(self, self->record(self->stamp, self->stream)) != 0) return;
    int code = NOT_READY;
    for (int tries = 0; tries < 20 && code == NOT_READY; tries++) code = failed(self, self->query(self->stamp));
    if (code == 0 && count_elapsed(self, self->last.events[0], self->stamp, record.elapsed_ns) == 0) write_record(self, &record);
}

/* Whether the device got to an entry, which is written then. */
static int read_entry(Events *self, const Entry *entry) {
    Record record = {.devices = entry->devices, .host_ns = entry->host_ns, .code = entry->code, .step = entry->step};
    int64_t asked_ns = now_ns();
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
    int64_t until_ns = now_ns() - QUEUED_NS, pushed = __atomic_load_n(&self->pushed, __ATOMIC_ACQUIRE);
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
PyObject *push_events(PyObject *, PyObject *), *start_events(PyObject *, PyObject *); /* in the methods of _edges.c */

PyObject *push_events(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long address;
    long long host_ns, code, step;
    PyObject *handles;
    if (!PyArg_ParseTuple(args, "KLLLO!:push_events", &address, &host_ns, &code, &step, &PyTuple_Type, &handles)) return NULL;
    Events *self = (Events *)(uintptr_t)address;
    Entry entry = {.devices = PyTuple_Size(handles), .host_ns = host_ns, .code = code, .step = step};
    if (entry.devices > MOST_DEVICES || self->pushed - __atomic_load_n(&self->read, __ATOMIC_ACQUIRE) >= QUEUED) return Py_NewRef(Py_False);
    for (int n = 0; n < entry.devices; n++) entry.events[n] = PyLong_AsVoidPtr(PyTuple_GetItem(handles, n));
    if (PyErr_Occurred()) return NULL;
    self->queue[self->pushed % QUEUED] = entry;
    __atomic_store_n(&self->pushed, self->pushed + 1, __ATOMIC_RELEASE);
    return Py_NewRef(Py_True);
}

/* start_events(address): the thread. Its state must stay where it is until `ended`. */
PyObject *start_events(PyObject *Py_UNUSED(module), PyObject *address) {
    Events *self = (Events *)PyLong_AsVoidPtr(address);
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all); /* signals interrupt the thread of the program that waits for them */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failure = pthread_create(&thread, NULL, events_thread, self);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failure || pthread_detach(thread)) return PyErr_Format(PyExc_RuntimeError, "can't start new thread");
    return Py_NewRef(Py_None);
}
