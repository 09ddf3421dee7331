/*
 * Writes, reads and verifies the records of segment files: one call per I/O task, without Python.
 *
 * The caller plans a task (no I/O, keeps the interpreter), opens the segments of its runs, and
 * then lets the task run. All memory is the caller's; nothing is kept between calls. Places come
 * from a catalog that may be damaged: none of them is used before `fits` has accepted it.
 * The rules of transfers that stop early are those of tierstore/backend/segments/vectored.py,
 * the bytes of a header those of tierstore/codec/record.py.
 */
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>

#define PAGE_BYTES 4096
#define HEADER_BYTES 128
#define EXTENT_RECORDS_MAX 32
#define KEY_BYTES_MAX 76
#define VECTORS_MAX 1024 /* IOV_MAX of Linux */

enum { DONE = 0, UNTRIED = -1, SHORT = -2, IMPOSSIBLE = -3, MISMATCH = -4 }; /* or an errno */

/* Packed: the bytes of places come from anywhere, and begin at any address. */
typedef struct __attribute__((packed)) {
    uint32_t segment, header_page, index, stride_pages, payload_bytes, segment_pages;
} place_t;

typedef struct {
    uint64_t magic;
    uint16_t version, key_bytes;
    uint32_t payload_bytes;
    uint8_t key[KEY_BYTES_MAX];
    uint32_t rank;
    uint64_t payload_checksum;
    uint8_t reserved[16];
    uint64_t header_checksum;
} header_t;

typedef struct {
    uint64_t (*hash)(const void *, size_t);
    uint64_t magic;
    uint32_t version, rank;
    uint64_t count;
    const place_t *places;
    const uint64_t *slots; /* addresses */
    const int64_t *slot_bytes;
    const uint8_t *keys; /* one behind another */
    const uint32_t *key_ends;
    int32_t *status;     /* per record */
    uint32_t *order;     /* of the records in the runs */
    uint8_t *room;       /* pages for headers, page-aligned */
    uint64_t room_pages;
} batch_t;

typedef struct {
    int64_t offset;        /* in the file, of the first byte that is moved */
    int64_t header_offset; /* of a header page that is read before; -1: none */
    uint32_t segment, segment_pages;
    uint32_t first, count; /* records, as positions in `order` */
    uint32_t first_header_page, last_header_page; /* of its first and last record's extents, */
    uint32_t first_extent, last_extent;           /* which are counted within the task */
    int32_t fd; /* set by the caller; negative: the run is left out */
    int32_t status;
} run_t;

/* A file that a path led to, and must still lead to. */
typedef struct {
    const char *path;
    uint64_t device, inode;
    int64_t size_bytes; /* at least, with one name and without links; -1: anything else */
} known_t;

enum { WRITTEN = 0, NOT_BEGUN = 1, NOT_KEPT = 2 };

typedef ssize_t (*move_t)(int, const struct iovec *, int, off_t);

_Static_assert(sizeof(place_t) == 24, "a place");
_Static_assert(sizeof(header_t) == HEADER_BYTES, "a header");
_Static_assert(sizeof(run_t) == 56, "a run");
_Static_assert(sizeof(known_t) == 32, "a known file");

static const place_t *place_at(const batch_t *batch, uint64_t position) {
    return &batch->places[batch->order[position]];
}

static int64_t slot_bytes_of(const place_t *place) {
    return (int64_t)place->stride_pages * PAGE_BYTES;
}

static int64_t payload_page(const place_t *place) {
    return (int64_t)place->header_page + 1 + (int64_t)place->index * place->stride_pages;
}

static int same_extent(const place_t *a, const place_t *b) {
    return a->segment == b->segment && a->header_page == b->header_page;
}

static int continues(const place_t *place, const place_t *before) {
    return same_extent(place, before) && place->stride_pages == before->stride_pages &&
           place->index == (uint64_t)before->index + 1;
}

static uint32_t key_start(const batch_t *batch, uint32_t record) {
    return record == 0 ? 0 : batch->key_ends[record - 1];
}

/* Return whether a place is possible and as long as its slot, and the key fits a header. */
static int fits(const batch_t *batch, uint32_t record) {
    const place_t *place = &batch->places[record];
    return place->index < EXTENT_RECORDS_MAX && place->payload_bytes > 0 &&
           place->payload_bytes <= slot_bytes_of(place) &&
           batch->slot_bytes[record] == slot_bytes_of(place) &&
           batch->key_ends[record] - key_start(batch, record) <= KEY_BYTES_MAX;
}

/* Make the header that a record has, whose payload is in its slot. */
static void seal(const batch_t *batch, uint32_t record, header_t *header) {
    const place_t *place = &batch->places[record];
    uint32_t start = key_start(batch, record);
    memset(header, 0, sizeof *header);
    header->magic = batch->magic;
    header->version = (uint16_t)batch->version;
    header->key_bytes = (uint16_t)(batch->key_ends[record] - start);
    header->payload_bytes = place->payload_bytes;
    memcpy(header->key, batch->keys + start, header->key_bytes);
    header->rank = batch->rank;
    header->payload_checksum =
        batch->hash((const void *)(uintptr_t)batch->slots[record], place->payload_bytes);
    header->header_checksum = batch->hash(header, offsetof(header_t, header_checksum));
}

static void add(struct iovec *vectors, int *count, void *start, int64_t size_bytes) {
    vectors[*count].iov_base = start;
    vectors[*count].iov_len = (size_t)size_bytes;
    ++*count;
}

static int skip(struct iovec **vectors, int count, size_t moved) {
    while (count > 0 && moved >= (*vectors)->iov_len) {
        moved -= (*vectors)->iov_len;
        ++*vectors;
        --count;
    }
    if (count > 0) {
        (*vectors)->iov_base = (uint8_t *)(*vectors)->iov_base + moved;
        (*vectors)->iov_len -= moved;
    }
    return count;
}

/* Repeat a vectored call until all is moved, or it makes no progress; see `move_all` in Python.
 * Returns the bytes moved, whole pages or all; or a negative errno. */
static int64_t move_all(move_t move, int fd, struct iovec *vectors, int count, int64_t offset) {
    int64_t left = 0, done = 0;
    int was_stuck = 0;
    for (int i = 0; i < count; i++) left += (int64_t)vectors[i].iov_len;
    while (left > 0) {
        ssize_t moved = move(fd, vectors, count, (off_t)(offset + done));
        if (moved < 0 && errno == EINTR) continue;
        if (moved < 0) return -errno;
        if (moved == left) return done + moved;
        int is_stuck = moved < PAGE_BYTES;
        if (moved == 0 || (is_stuck && was_stuck)) break;
        was_stuck = is_stuck;
        moved -= moved % PAGE_BYTES;
        done += moved;
        left -= moved;
        count = skip(&vectors, count, (size_t)moved);
    }
    return done;
}

/* Return which version of this file the library was compiled from. */
uint64_t tierstore_source_mark(void) {
    return TIERSTORE_SOURCE_MARK;
}

/* Divide a task into extents; return how many. `runs` has room for one per record. */
uint64_t tierstore_plan_writes(const batch_t *batch, run_t *runs) {
    uint64_t count = 0;
    run_t *run = runs;
    for (uint32_t i = 0; i < batch->count; i++) {
        const place_t *place = &batch->places[i];
        batch->order[i] = i;
        if (i == 0 || !continues(place, &batch->places[i - 1])) {
            run = &runs[count++];
            *run = (run_t){.offset = (int64_t)place->header_page * PAGE_BYTES, .fd = -1,
                           .header_offset = -1, .segment = place->segment, .first = i,
                           .segment_pages = place->segment_pages, .status = UNTRIED};
            if (place->index != 0) run->status = IMPOSSIBLE;
        }
        run->count++;
        if (!fits(batch, i) || payload_page(place) + place->stride_pages > run->segment_pages)
            run->status = IMPOSSIBLE;
    }
    return count;
}

/* Return whether all paths lead to their files; not if a device does not tell. */
static int are_in_place(const known_t *known, uint64_t count) {
    struct stat now;
    for (; count > 0; count--, known++) {
        int is_segment = known->size_bytes >= 0;
        if ((is_segment ? lstat : stat)(known->path, &now) != 0) return 0;
        if (now.st_dev != known->device || now.st_ino != known->inode) return 0;
        if (is_segment && (now.st_nlink != 1 || now.st_size < known->size_bytes)) return 0;
    }
    return 1;
}

static void write_runs(const batch_t *batch, run_t *runs, uint64_t run_count) {
    struct iovec vectors[EXTENT_RECORDS_MAX + 1];
    for (run_t *run = runs; run < runs + run_count; run++) {
        if (run->fd < 0 || run->status != UNTRIED) continue;
        int count = 0;
        int64_t size_bytes = PAGE_BYTES;
        add(vectors, &count, batch->room, PAGE_BYTES);
        memset(batch->room, 0, PAGE_BYTES);
        for (uint32_t i = 0; i < run->count; i++) {
            uint32_t record = run->first + i;
            seal(batch, record, (header_t *)(void *)(batch->room + (size_t)i * HEADER_BYTES));
            add(vectors, &count, (void *)(uintptr_t)batch->slots[record],
                batch->slot_bytes[record]);
            size_bytes += batch->slot_bytes[record];
        }
        int64_t done = move_all(pwritev, run->fd, vectors, count, run->offset);
        run->status = done < 0 ? (int32_t)-done : done < size_bytes ? SHORT : DONE;
    }
}

/* Write extents that have a descriptor; the status of each is set. NOT_BEGUN: nothing was written,
 * as a known file is not in its place; NOT_KEPT: one of the first `kept_count` no longer is. */
int32_t tierstore_write(const batch_t *batch, run_t *runs, uint64_t run_count,
                        const known_t *known, uint64_t known_count, uint64_t kept_count) {
    if (!are_in_place(known, known_count)) return NOT_BEGUN;
    write_runs(batch, runs, run_count);
    return are_in_place(known, kept_count) ? WRITTEN : NOT_KEPT;
}

typedef struct {
    uint64_t extent;
    uint32_t index, record;
} sorted_t;

static int compare(const void *left, const void *right) {
    const sorted_t *a = left, *b = right;
    if (a->extent != b->extent) return a->extent < b->extent ? -1 : 1;
    if (a->index != b->index) return a->index < b->index ? -1 : 1;
    return a->record < b->record ? -1 : a->record > b->record;
}

/* Order the records with possible places by their places; return how many, or -1 (no memory). */
static int64_t sort(const batch_t *batch) {
    int64_t count = 0;
    int is_sorted = 1;
    sorted_t *all = malloc((batch->count + 1) * sizeof *all);
    if (all == NULL) return -1;
    for (uint32_t i = 0; i < batch->count; i++) {
        const place_t *place = &batch->places[i];
        batch->status[i] = fits(batch, i) ? UNTRIED : IMPOSSIBLE;
        if (batch->status[i] == IMPOSSIBLE) continue;
        all[count] = (sorted_t){(uint64_t)place->segment << 32 | place->header_page, place->index,
                                i};
        is_sorted = is_sorted && (count == 0 || compare(&all[count - 1], &all[count]) <= 0);
        count++;
    }
    if (!is_sorted) qsort(all, (size_t)count, sizeof *all, compare);
    for (int64_t i = 0; i < count; i++) batch->order[i] = all[i].record;
    free(all);
    return count;
}

/* Sort a task by place and divide it into runs that lie one behind another; return how many, or
 * -1 (no memory). No run begins a new pass over the room for headers in its middle. */
int64_t tierstore_plan_reads(const batch_t *batch, run_t *runs) {
    int64_t count = 0, end = 0, record_count = sort(batch);
    uint32_t extent = 0, vectors = 0;
    for (int64_t i = 0; i < record_count; i++) {
        const place_t *place = place_at(batch, (uint64_t)i);
        const place_t *before = i > 0 ? place_at(batch, (uint64_t)i - 1) : NULL;
        int is_head = place->index == 0, is_new = before == NULL || !same_extent(place, before);
        int64_t start = payload_page(place) - is_head;
        if (before != NULL) extent += (uint32_t)is_new;
        int is_next_pass = is_new && extent % batch->room_pages == 0;
        if (before == NULL || place->segment != before->segment || start != end || is_next_pass ||
            vectors + 2 > VECTORS_MAX) {
            int is_fetched = is_new && !is_head;
            int64_t header = (int64_t)place->header_page * PAGE_BYTES;
            runs[count++] = (run_t){.offset = start * PAGE_BYTES, .first = (uint32_t)i, .fd = -1,
                                    .header_offset = is_fetched ? header : -1,
                                    .segment = place->segment, .status = UNTRIED,
                                    .segment_pages = place->segment_pages, .first_extent = extent,
                                    .first_header_page = place->header_page};
            vectors = 0;
        }
        runs[count - 1].count++;
        runs[count - 1].last_extent = extent;
        runs[count - 1].last_header_page = place->header_page;
        vectors += 1 + (uint32_t)is_head;
        end = payload_page(place) + place->stride_pages;
    }
    return record_count < 0 ? -1 : count;
}

static uint8_t *page_of(const batch_t *batch, uint32_t extent) {
    return batch->room + extent % batch->room_pages * PAGE_BYTES;
}

/* Read a run with its header pages; return the bytes of it that arrived, or a negative errno. */
static int64_t fill(const batch_t *batch, const run_t *run) {
    struct iovec vectors[VECTORS_MAX];
    int count = 0;
    uint32_t extent = run->first_extent;
    if (run->header_offset >= 0) {
        add(vectors, &count, page_of(batch, extent), PAGE_BYTES);
        int64_t done = move_all(preadv, run->fd, vectors, count, run->header_offset);
        if (done < 0) return done;
        count = 0;
    }
    for (uint32_t i = run->first; i < run->first + run->count; i++) {
        const place_t *place = place_at(batch, i);
        uint32_t record = batch->order[i];
        if (i > run->first && !same_extent(place, place_at(batch, i - 1))) extent++;
        if (place->index == 0) add(vectors, &count, page_of(batch, extent), PAGE_BYTES);
        add(vectors, &count, (void *)(uintptr_t)batch->slots[record], batch->slot_bytes[record]);
    }
    return move_all(preadv, run->fd, vectors, count, run->offset);
}

/* Compare the records of a run that arrived with their headers. */
static void verify(const batch_t *batch, const run_t *run, int64_t arrived_bytes) {
    uint32_t extent = run->first_extent;
    for (uint32_t i = run->first; i < run->first + run->count; i++) {
        const place_t *place = place_at(batch, i);
        uint32_t record = batch->order[i];
        header_t expected;
        if (i > run->first && !same_extent(place, place_at(batch, i - 1))) extent++;
        arrived_bytes -= batch->slot_bytes[record] + (place->index == 0 ? PAGE_BYTES : 0);
        if (arrived_bytes < 0) return;
        seal(batch, record, &expected);
        const uint8_t *found = page_of(batch, extent) + place->index * HEADER_BYTES;
        batch->status[record] = memcmp(&expected, found, HEADER_BYTES) == 0 ? DONE : MISMATCH;
    }
}

/* Read and verify the runs that have a descriptor, all of one pass. Records that are the ones
 * asked for get the status DONE, and so do runs of which all are; returns how many runs, or -1:
 * nothing was read, as a known file is not in its place. */
int64_t tierstore_read(const batch_t *batch, run_t *runs, uint64_t run_count,
                       const known_t *known, uint64_t known_count) {
    int64_t done_count = 0;
    if (!are_in_place(known, known_count)) return -1;
    for (run_t *run = runs; run < runs + run_count; run++) {
        if (run->fd < 0) continue;
        int64_t done = fill(batch, run);
        run->status = done < 0 ? (int32_t)-done : DONE;
        if (done >= 0) verify(batch, run, done);
        for (uint32_t i = run->first; i < run->first + run->count; i++)
            if (batch->status[batch->order[i]] != DONE) run->status = MISMATCH;
        done_count += run->status == DONE;
    }
    return done_count;
}

/* Sorted numbers, and sorted queries that may be among them. */
typedef struct {
    const uint64_t *numbers;
    uint64_t number_count;
    const uint64_t *queries;
    uint64_t query_count;
} search_t;

_Static_assert(sizeof(search_t) == 32, "a search");

/* Return whether any query is among its numbers. */
int32_t tierstore_has_match(const search_t *searches, uint64_t search_count) {
    for (const search_t *search = searches; search < searches + search_count; search++) {
        const uint64_t *low = search->numbers, *end = low + search->number_count;
        const uint64_t *query = search->queries, *queries_end = query + search->query_count;
        for (; query < queries_end && low < end; query++) {
            uint64_t left = (uint64_t)(end - low);
            while (left > 0) {
                uint64_t half = left / 2;
                if (low[half] < *query) {
                    low += half + 1;
                    left -= half + 1;
                } else {
                    left = half;
                }
            }
            if (low < end && *low == *query) return 1;
        }
    }
    return 0;
}
