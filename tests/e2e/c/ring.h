/* An io_uring without a library: one transfer at a time. */
#ifndef SWAPTIDE_TEST_RING_H
#define SWAPTIDE_TEST_RING_H

#include "common.h"

#include <linux/io_uring.h>
#include <sys/syscall.h>

struct ring {
    int fd;
    unsigned *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
};

static inline int ring_make(struct ring *ring) {
    struct io_uring_params params = {0};
    ring->fd = (int)syscall(SYS_io_uring_setup, 8, &params);
    if (ring->fd < 0) return 0;
    size_t sq = params.sq_off.array + params.sq_entries * sizeof(unsigned),
           cq = params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
    char *s = mmap(NULL, sq, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring->fd,
                   IORING_OFF_SQ_RING);
    char *c = mmap(NULL, cq, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring->fd,
                   IORING_OFF_CQ_RING);
    ring->sqes = mmap(NULL, params.sq_entries * sizeof *ring->sqes, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_POPULATE, ring->fd, IORING_OFF_SQES);
    MUST(s != MAP_FAILED && c != MAP_FAILED && ring->sqes != MAP_FAILED);
    ring->sq_tail = (unsigned *)(s + params.sq_off.tail),
    ring->sq_mask = (unsigned *)(s + params.sq_off.ring_mask);
    ring->sq_array = (unsigned *)(s + params.sq_off.array);
    ring->cq_head = (unsigned *)(c + params.cq_off.head),
    ring->cq_tail = (unsigned *)(c + params.cq_off.tail);
    ring->cq_mask = (unsigned *)(c + params.cq_off.ring_mask),
    ring->cqes = (struct io_uring_cqe *)(c + params.cq_off.cqes);
    return 1;
}

/* One transfer; returns its result. `index`: of a registered buffer, or -1; `flags`: of the
 * file. */
static inline int ring_do(struct ring *ring, int opcode, int fd, void *buffer, unsigned len,
                          size_t offset, int index, unsigned flags) {
    unsigned tail = *ring->sq_tail, slot = tail & *ring->sq_mask;
    struct io_uring_sqe *sqe = &ring->sqes[slot];
    memset(sqe, 0, sizeof *sqe);
    sqe->opcode = (uint8_t)opcode, sqe->fd = fd, sqe->addr = (uint64_t)(uintptr_t)buffer,
    sqe->len = len, sqe->off = offset;
    sqe->buf_index = (uint16_t)(index < 0 ? 0 : index);
    sqe->flags = (uint8_t)(flags | (index < 0 ? IOSQE_ASYNC : 0));
    ring->sq_array[slot] = slot;
    __atomic_store_n(ring->sq_tail, tail + 1, __ATOMIC_RELEASE);
    while (syscall(SYS_io_uring_enter, ring->fd, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) < 0)
        MUST(errno == EINTR);
    unsigned head = *ring->cq_head;
    MUST(head != __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE));
    int result = ring->cqes[head & *ring->cq_mask].res;
    __atomic_store_n(ring->cq_head, head + 1, __ATOMIC_RELEASE);
    return result;
}

#endif
