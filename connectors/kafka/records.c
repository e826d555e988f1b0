/* Record batches as Kafka's brokers keep them: https://kafka.apache.org/documentation/#recordbatch
 *
 * Only what has the common form is read, see `runs.py`; of anything else nothing is said here but that it is that. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE4_2__
#include <nmmintrin.h>
#endif

/* A number (zigzag, seven bits a byte, the lowest first) of at most so many bytes before `end`; the place after it, or
 * NULL where it has more. */
static const uint8_t *number(const uint8_t *at, const uint8_t *end, int longest, int64_t *out) {
    uint64_t bits = 0;
    for (int place = 0; place < longest && at < end; place++) {
        bits |= (uint64_t)(*at & 127) << 7 * place;
        if (*at++ < 128) {
            *out = (int64_t)(bits >> 1) ^ -(int64_t)(bits & 1);
            return at;
        }
    }
    return NULL;
}

/* Most bytes of a record's length, and of its other numbers. */
typedef struct {
    int32_t length, number;
} Longest;

/* One record: where it begins, after its length, and ends; its time and offset after the batch's first; where key and
 * value begin, each followed by its length, -1 for none. The place after it, or NULL where it is of another form or does
 * not end before `all`. */
static const uint8_t *record(const uint8_t *buffer, const uint8_t *p, const uint8_t *all, Longest longest,
                             int64_t field[8]) {
    int64_t length;
    if (!(p = number(p, all, longest.length, &length)) || length < 1 || length > all - p) return NULL;
    const uint8_t *end = p + length;
    field[0] = p - buffer, field[1] = end - buffer;
    if (*p++ >= 128) return NULL; /* attributes, which mean nothing */
    for (int j = 2; j < 4; j++)
        if (!(p = number(p, end, longest.number, &field[j]))) return NULL;
    for (int j = 4; j < 8; j += 2) {
        if (!(p = number(p, end, longest.number, &field[j + 1])) || field[j + 1] < -1) return NULL;
        field[j] = p - buffer;
        if (field[j + 1] > end - p) return NULL;
        if (field[j + 1] > 0) p += field[j + 1];
    }
    return end - p == 1 && *p == 0 ? end : NULL; /* no headers */
}

/* The fields of so many records from a place on, a field a row: out is (8, count). Returns 1, or 0 where one of them is
 * of another form or they are not all there. */
int32_t read_records(const uint8_t *buffer, int64_t size, int64_t at, int64_t count, int32_t longest_length,
                     int32_t longest_number, int64_t *out) {
    const uint8_t *p = buffer + at;
    const Longest longest = {longest_length, longest_number};
    for (int64_t i = 0; i < count; i++) {
        int64_t field[8];
        if (!(p = record(buffer, p, buffer + size, longest, field))) return 0;
        for (int j = 0; j < 8; j++) out[j * count + i] = field[j];
    }
    return 1;
}

/* A whole number of so many bytes, the highest first. */
static int64_t whole(const uint8_t *p, int bytes) {
    uint64_t bits = *p & 128 ? ~(uint64_t)0 : 0;
    for (int i = 0; i < bytes; i++) bits = bits << 8 | p[i];
    return (int64_t)bits;
}

/* CRC-32C (Castagnoli). */
static uint32_t checksum(const uint8_t *p, const uint8_t *end) {
    uint64_t crc = 0xFFFFFFFF;
#if defined(__SSE4_2__) && !defined(PORTABLE)
    for (uint64_t eight; end - p >= 8; p += 8) {
        memcpy(&eight, p, 8);
        crc = _mm_crc32_u64(crc, eight);
    }
    for (; p < end; p++) crc = _mm_crc32_u8((uint32_t)crc, *p);
#else
    for (; p < end; p++) {
        crc ^= *p;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78 : 0);
    }
#endif
    return ~(uint32_t)crc;
}

/* Where a batch has what; it begins with the first offset, and its length counts from EPOCH on. */
enum {
    LENGTH = 8,
    EPOCH = 12,
    MAGIC = 16,
    CHECKSUM = 17,
    ATTRIBUTES = 21,
    LAST = 23,
    FIRST_TIME = 27,
    LAST_TIME = 35,
    COUNT = 57,
    RECORDS = 61
};
enum { TIMES_ARE_THE_BROKERS = 8 };

/* All records of the batches from a place on, as long as each is whole, uncompressed, of no transaction, has the checksum
 * that it says, and records of the common form, `most` in all. The rows of out, (8, most), are as above, but time and
 * offset are the record's own. after: of the last of these batches, the place after it, the offset after it, and its
 * leader's epoch. Returns how many records that are. */
int64_t read_batches(const uint8_t *buffer, int64_t size, int64_t at, int64_t most, int32_t longest_length,
                     int32_t longest_number, int64_t *out, int64_t *after) {
    const Longest longest = {longest_length, longest_number};
    int64_t done = 0;
    while (size - at >= RECORDS) {
        const uint8_t *head = buffer + at, *p = head + RECORDS;
        const int64_t length = whole(head + LENGTH, 4), count = whole(head + COUNT, 4);
        const int64_t attributes = whole(head + ATTRIBUTES, 2);
        if (length < RECORDS - EPOCH || length > size - at - EPOCH || head[MAGIC] != 2) break;
        if ((attributes & ~TIMES_ARE_THE_BROKERS) != 0 || count < 1 || count > most - done) break;
        const uint8_t *end = head + EPOCH + length;
        if (checksum(head + ATTRIBUTES, end) != (uint32_t)whole(head + CHECKSUM, 4)) break;
        const uint64_t offset = (uint64_t)whole(head, 8), first = (uint64_t)whole(head + FIRST_TIME, 8);
        for (int64_t i = done; i < done + count && p; i++) {
            int64_t field[8];
            if (!(p = record(buffer, p, end, longest, field))) break;
            field[2] = attributes ? whole(head + LAST_TIME, 8) : (int64_t)(first + (uint64_t)field[2]);
            field[3] = (int64_t)(offset + (uint64_t)field[3]);
            for (int j = 0; j < 8; j++) out[j * most + i] = field[j];
        }
        if (p != end) break;
        done += count;
        at = end - buffer;
        after[0] = at, after[1] = (int64_t)offset + whole(head + LAST, 4) + 1, after[2] = whole(head + EPOCH, 4);
    }
    return done;
}
