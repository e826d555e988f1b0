/* Reading of Kafka record batches (https://kafka.apache.org/documentation/#recordbatch).
 *
 * Only records of the common form are read; `record_columns.py` defines that form. Anything else stops the reading, and
 * the caller then parses it with the client library. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE4_2__
#include <nmmintrin.h>
#endif

/* Decode a zigzag varint (seven bits per byte, lowest bits first) of at most `max_bytes` bytes.
 * Returns the position after it, or NULL if it is longer or does not end before `end`. */
static const uint8_t *decode_varint(const uint8_t *p, const uint8_t *end, int max_bytes, int64_t *out) {
    uint64_t bits = 0;
    for (int i = 0; i < max_bytes && p < end; i++) {
        bits |= (uint64_t)(*p & 127) << 7 * i;
        if (*p++ < 128) {
            *out = (int64_t)(bits >> 1) ^ -(int64_t)(bits & 1);
            return p;
        }
    }
    return NULL;
}

/* Maximum number of bytes of a record's length, and of its other numbers. */
typedef struct {
    int32_t length, number;
} MaxBytes;

/* Read one record. The fields are:
 *   0, 1: position after the record's length, end position
 *   2, 3: time and offset, relative to the batch's first
 *   4, 5: position and length of the key, length -1 for none
 *   6, 7: position and length of the value, length -1 for none
 * Returns the position after the record, or NULL if it is not of the common form or does not end before `end_of_data`. */
static const uint8_t *read_record(const uint8_t *buffer, const uint8_t *p, const uint8_t *end_of_data,
                                  MaxBytes max_bytes, int64_t field[8]) {
    int64_t length;
    if (!(p = decode_varint(p, end_of_data, max_bytes.length, &length)) || length < 1 || length > end_of_data - p)
        return NULL;
    const uint8_t *end = p + length;
    field[0] = p - buffer, field[1] = end - buffer;
    if (*p++ >= 128) return NULL; /* the attributes of a record, which are one unused byte */
    for (int j = 2; j < 4; j++)
        if (!(p = decode_varint(p, end, max_bytes.number, &field[j]))) return NULL;
    for (int j = 4; j < 8; j += 2) {
        if (!(p = decode_varint(p, end, max_bytes.number, &field[j + 1])) || field[j + 1] < -1) return NULL;
        field[j] = p - buffer;
        if (field[j + 1] > end - p) return NULL;
        if (field[j + 1] > 0) p += field[j + 1];
    }
    return end - p == 1 && *p == 0 ? end : NULL; /* the number of headers must be 0 */
}

/* Read `count` records from position `at` on. `out` has shape (8, count): row j holds field j of each record.
 * Returns 1, or 0 if a record is not of the common form or is incomplete. */
int32_t read_records(const uint8_t *buffer, int64_t size, int64_t at, int64_t count, int32_t max_length_bytes,
                     int32_t max_number_bytes, int64_t *out) {
    const uint8_t *p = buffer + at;
    const MaxBytes max_bytes = {max_length_bytes, max_number_bytes};
    for (int64_t i = 0; i < count; i++) {
        int64_t field[8];
        if (!(p = read_record(buffer, p, buffer + size, max_bytes, field))) return 0;
        for (int j = 0; j < 8; j++) out[j * count + i] = field[j];
    }
    return 1;
}

/* Return a signed big-endian integer of `num_bytes` bytes. */
static int64_t read_integer(const uint8_t *p, int num_bytes) {
    uint64_t bits = *p & 128 ? ~(uint64_t)0 : 0;
    for (int i = 0; i < num_bytes; i++) bits = bits << 8 | p[i];
    return (int64_t)bits;
}

/* Return the CRC-32C (Castagnoli) checksum of the bytes from `p` to before `end`. */
static uint32_t compute_crc32c(const uint8_t *p, const uint8_t *end) {
    uint64_t crc = 0xFFFFFFFF;
#if defined(__SSE4_2__) && !defined(PORTABLE)
    for (uint64_t word; end - p >= 8; p += 8) {
        memcpy(&word, p, 8);
        crc = _mm_crc32_u64(crc, word);
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

/* Positions of the fields in the header of a batch. The header begins with the first offset; the batch's length counts
 * the bytes from LEADER_EPOCH on. */
enum {
    LENGTH = 8,
    LEADER_EPOCH = 12,
    MAGIC = 16,
    CHECKSUM = 17,
    ATTRIBUTES = 21,
    LAST_OFFSET_DELTA = 23,
    FIRST_TIME = 27,
    LAST_TIME = 35,
    NUM_RECORDS = 57,
    RECORDS = 61
};
/* The bit of the attributes that is set if the broker, not the sender, has stated the times. */
enum { LOG_APPEND_TIME = 8 };

/* Read all records of consecutive batches from position `at` on.
 *
 * The reading stops before the first batch that is incomplete, compressed, part of a transaction, damaged (by its
 * checksum), not of the common form, or would exceed `max_records` records in all.
 *
 * out: (8, max_records), fields as in `read_record`, but with the absolute time and offset of each record.
 * after: position and offset after the last batch that was read, and its leader epoch.
 * Returns the number of records. */
int64_t read_batches(const uint8_t *buffer, int64_t size, int64_t at, int64_t max_records, int32_t max_length_bytes,
                     int32_t max_number_bytes, int64_t *out, int64_t *after) {
    const MaxBytes max_bytes = {max_length_bytes, max_number_bytes};
    int64_t num_read = 0;
    while (size - at >= RECORDS) {
        const uint8_t *header = buffer + at, *p = header + RECORDS;
        const int64_t length = read_integer(header + LENGTH, 4), count = read_integer(header + NUM_RECORDS, 4);
        const int64_t attributes = read_integer(header + ATTRIBUTES, 2);
        if (length < RECORDS - LEADER_EPOCH || length > size - at - LEADER_EPOCH || header[MAGIC] != 2) break;
        if ((attributes & ~LOG_APPEND_TIME) != 0 || count < 1 || count > max_records - num_read) break;
        const uint8_t *end = header + LEADER_EPOCH + length;
        if (compute_crc32c(header + ATTRIBUTES, end) != (uint32_t)read_integer(header + CHECKSUM, 4)) break;
        const uint64_t first_offset = (uint64_t)read_integer(header, 8);
        const uint64_t first_time = (uint64_t)read_integer(header + FIRST_TIME, 8);
        for (int64_t i = num_read; i < num_read + count && p; i++) {
            int64_t field[8];
            if (!(p = read_record(buffer, p, end, max_bytes, field))) break;
            field[2] = attributes ? read_integer(header + LAST_TIME, 8) : (int64_t)(first_time + (uint64_t)field[2]);
            field[3] = (int64_t)(first_offset + (uint64_t)field[3]);
            for (int j = 0; j < 8; j++) out[j * max_records + i] = field[j];
        }
        if (p != end) break;
        num_read += count;
        at = end - buffer;
        after[0] = at;
        after[1] = (int64_t)first_offset + read_integer(header + LAST_OFFSET_DELTA, 4) + 1;
        after[2] = read_integer(header + LEADER_EPOCH, 4);
    }
    return num_read;
}
