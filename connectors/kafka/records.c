/* Where the parts of records stand in an uncompressed batch: https://kafka.apache.org/documentation/#recordbatch
 *
 * Only records of the common form are read, see `runs.py`; of others nothing is said here but that they are others. */
#include <stddef.h>
#include <stdint.h>

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

/* The rows of out, (8, count): where a record begins, after its length, and ends; its time and offset after the batch's
 * first; where key and value begin, each followed by its length, -1 for none. Returns 1, or 0 where one of the records
 * is not of the common form or they are not all there. */
int32_t read_records(const uint8_t *buffer, int64_t size, int64_t at, int64_t count, int32_t longest_length,
                     int32_t longest_number, int64_t *out) {
    const uint8_t *p = buffer + at, *all = buffer + size;
    for (int64_t i = 0; i < count; i++) {
        int64_t length, field[8];
        if (!(p = number(p, all, longest_length, &length)) || length < 1 || length > all - p) return 0;
        const uint8_t *end = p + length;
        field[0] = p - buffer, field[1] = end - buffer;
        if (*p++ >= 128) return 0; /* attributes, which mean nothing */
        for (int j = 2; j < 4; j++)
            if (!(p = number(p, end, longest_number, &field[j]))) return 0;
        for (int j = 4; j < 8; j += 2) {
            if (!(p = number(p, end, longest_number, &field[j + 1])) || field[j + 1] < -1) return 0;
            field[j] = p - buffer;
            if (field[j + 1] > end - p) return 0;
            if (field[j + 1] > 0) p += field[j + 1];
        }
        if (end - p != 1 || *p != 0) return 0; /* no headers */
        p = end;
        for (int j = 0; j < 8; j++) out[j * count + i] = field[j];
    }
    return 1;
}
