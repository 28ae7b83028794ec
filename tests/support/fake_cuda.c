/* A driver of one device with a clock that the test moves. An event holds the instant at which the device gets to it. */

#include <stdint.h>
#include <unistd.h>

static int64_t now_ns;
static int fault, hangs, mode, asked;
static void *context;

#define GET(of) __atomic_load_n(&of, __ATOMIC_SEQ_CST)
#define SET(of, to) __atomic_store_n(&of, to, __ATOMIC_SEQ_CST)

void set_now(int64_t ns) { SET(now_ns, ns); }
void set_fault(int code) { SET(fault, code); }
void set_hangs(int on) {
    SET(asked, 0);
    SET(hangs, on);
}
int mode_of_reader(void) { return GET(mode); }
void *context_of_reader(void) { return GET(context); }
int has_been_asked(void) { return GET(asked); }

/* Called with the interpreter lock held: the device goes on, and nothing of Python does. */
void hold(int seconds, int64_t ns) {
    SET(now_ns, GET(now_ns) + ns);
    for (int left = seconds * 100; left > 0; left--) usleep(10000);
}

int cuCtxSetCurrent(void *current) {
    SET(context, current);
    return 0;
}

int cuCtxGetCurrent(void **current) {
    *current = (void *)7;
    return 0;
}

int cuThreadExchangeStreamCaptureMode(int *exchanged) {
    SET(mode, *exchanged);
    return 0;
}

int cuEventQuery(const int64_t *event) {
    SET(asked, 1);
    while (GET(hangs)) usleep(1000);
    return GET(fault) ? GET(fault) : *event <= GET(now_ns) ? 0 : 600;
}

int cuEventElapsedTime(float *ms, const int64_t *begin, const int64_t *end) {
    *ms = (float)((double)(*end - *begin) / 1e6);
    return 0;
}

int cuEventRecord(int64_t *event, void *stream) {
    (void)stream;
    *event = GET(now_ns);
    return 0;
}
