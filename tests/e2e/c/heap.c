/* malloc, calloc, realloc, posix_memalign and free in every order, each block's content verified.
 * MODE threads: 4 at once. */
#include "common.h"

struct block {
    unsigned char *data;
    size_t size;
    uint64_t key;
};

struct worker {
    uint64_t state;
    size_t most, slots;
    double end;
};

static unsigned char byte_of(uint64_t key, size_t at) {
    return (unsigned char)(word_of(key, at >> 3) >> (at & 7) * 8);
}

static void fill(struct block *block, size_t from) {
    size_t at = from;
    for (; at < block->size && (at & 7); at++) block->data[at] = byte_of(block->key, at);
    for (; at + 8 <= block->size; at += 8) {
        uint64_t word = word_of(block->key, at >> 3);
        memcpy(block->data + at, &word, 8);
    }
    for (; at < block->size; at++) block->data[at] = byte_of(block->key, at);
}

static void check(const struct block *block, size_t size, const char *what) {
    size_t at = 0;
    for (; at + 8 <= size; at += 8) {
        uint64_t word, expected = word_of(block->key, at >> 3);
        memcpy(&word, block->data + at, 8);
        if (word != expected) mismatch(block->data + at, expected, word, what);
    }
    for (; at < size; at++)
        if (block->data[at] != byte_of(block->key, at))
            mismatch(block->data + at, byte_of(block->key, at), block->data[at], what);
}

/* Small blocks are many, large ones carry the bytes: 16 bytes to 2 MiB, exponents drawn evenly. */
static size_t some_size(uint64_t *state) {
    size_t top = (size_t)16 << below(state, 18);
    return top / 2 + below(state, top / 2 + 1) + 1;
}

static void *work(void *given) {
    struct worker *self = given;
    struct block *blocks = calloc(self->slots, sizeof *blocks);
    MUST(blocks != NULL);
    size_t live = 0, rounds = 0;
    while (rounds < self->slots * 2 || now() < self->end) {
        rounds++;
        struct block *block = &blocks[below(&self->state, self->slots)];
        unsigned choice = (unsigned)below(&self->state, 10);
        if (block->data == NULL) {
            size_t size = some_size(&self->state);
            if (live + size > self->most) {
                /* Full: drop blocks to make room, as a program under pressure of its own does. */
                for (int i = 0; i < 64; i++) {
                    struct block *old = &blocks[below(&self->state, self->slots)];
                    if (old->data == NULL) continue;
                    check(old, old->size, "block before free");
                    free(old->data);
                    live -= old->size;
                    *old = (struct block){0};
                }
                continue;
            }
            block->size = size;
            block->key = next(&self->state) | 1;
            if (choice < 2) {
                block->data = calloc(1, size);
                MUST(block->data != NULL);
                for (size_t at = 0; at < size; at++)
                    if (block->data[at]) mismatch(block->data + at, 0, block->data[at], "calloc");
            } else if (choice < 3) {
                MUST(posix_memalign((void **)&block->data, 4096, size) == 0);
            } else {
                block->data = malloc(size);
                MUST(block->data != NULL);
            }
            fill(block, 0);
            live += size;
        } else if (choice < 2) {
            check(block, block->size, "block before free");
            free(block->data);
            live -= block->size;
            *block = (struct block){0};
        } else if (choice < 4) {
            size_t old = block->size, size = some_size(&self->state);
            if (size > old && live + size - old > self->most) continue;
            block->data = realloc(block->data, size);
            MUST(block->data != NULL);
            block->size = size;
            check(block, old < size ? old : size, "block after realloc");
            if (size > old) fill(block, old);
            live += size - old;
        } else {
            check(block, block->size, "block");
        }
    }
    for (size_t i = 0; i < self->slots; i++) {
        if (blocks[i].data != NULL) check(&blocks[i], blocks[i].size, "block at the end");
        free(blocks[i].data);
    }
    free(blocks);
    return NULL;
}

int main(int count, char **words) {
    struct arguments given = parse(count, words, "single");
    int threads = strcmp(given.mode, "threads") == 0 ? 4 : 1;
    pthread_t ids[4];
    struct worker workers[4];
    for (int i = 0; i < threads; i++) {
        workers[i] = (struct worker){mix(given.seed + i), (given.megabytes << 20) / threads,
                                     given.megabytes * 24 / threads, now() + given.seconds};
        MUST(pthread_create(&ids[i], NULL, work, &workers[i]) == 0);
    }
    for (int i = 0; i < threads; i++) MUST(pthread_join(ids[i], NULL) == 0);
    return ok("heap", given.mode);
}
