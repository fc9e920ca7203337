/* A hash table from keys of up to 255 bytes to whole numbers, for batches of keys.
 *
 * Cells of 8 bytes lead to rows with the keys. The cells are so few bytes that most lookups find
 * them in a near cache, and rows are given out in order, so that those of a prefix lie together.
 * Both are fetched ahead for some keys at once, because most of what a lookup costs is waiting for
 * memory. What is taken out leaves no tombstone. One owner, no lock.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))

#define CELLS_MIN 64
#define CHUNK_ROWS 1024
/* Keys that are waited for together. */
#define AHEAD 32
#define ABSENT (-1)

/* `size` is that of the key and one more; a free row has its successor in `value`. */
struct row {
    int64_t value;
    uint16_t size;
    uint8_t key[];
};
#define KEY_AT offsetof(struct row, key)

/* `row` is one more than the number of the row; 0 is a free cell. */
struct cell {
    uint32_t hash;
    uint32_t row;
};

struct table {
    uint64_t seed;
    struct cell *cells;
    uint32_t mask; /* how many cells there are, less one */
    uint32_t count;
    uint8_t **chunks; /* of CHUNK_ROWS rows each */
    uint32_t chunk_count;
    uint32_t row_bytes; /* by the longest key so far */
    int64_t free_row;
};

struct wanted {
    const uint8_t *key;
    uint32_t hash;
    uint16_t size;
};

static uint64_t mixed(uint64_t a, uint64_t b)
{
    __uint128_t product = (__uint128_t)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint32_t hash_of(const struct table *table, const uint8_t *key, size_t length)
{
    uint64_t hash = table->seed ^ length * 0x9E3779B97F4A7C15u;
    while (length >= 8) {
        uint64_t word;
        memcpy(&word, key, 8);
        hash = mixed(hash ^ word, 0xD6E8FEB86659FD93u);
        key += 8;
        length -= 8;
    }
    uint64_t rest = 0;
    memcpy(&rest, key, length);
    return (uint32_t)mixed(hash ^ rest, 0xA0761D6478BD642Fu);
}

static struct row *row_at(const struct table *table, uint32_t row)
{
    uint8_t *chunk = table->chunks[row / CHUNK_ROWS];
    return (struct row *)(chunk + (size_t)(row % CHUNK_ROWS) * table->row_bytes);
}

/* The cell that leads to the key, or the free one where it would. */
static struct cell *find(const struct table *table, const struct wanted *it)
{
    for (uint32_t at = it->hash;; at++) {
        struct cell *cell = &table->cells[at & table->mask];
        if (cell->row == 0)
            return cell;
        if (cell->hash != it->hash)
            continue;
        const struct row *row = row_at(table, cell->row - 1);
        if (row->size == it->size && memcmp(row->key, it->key, it->size - 1u) == 0)
            return cell;
    }
}

/* Reads the next up to AHEAD keys, and has what is needed of the table fetched. */
static uint32_t fetch(const struct table *table, const uint8_t **keys, const uint8_t *lengths,
                      uint32_t count, struct wanted *batch)
{
    uint32_t size = count < AHEAD ? count : AHEAD;
    for (uint32_t i = 0; i < size; i++) {
        batch[i] = (struct wanted){*keys, hash_of(table, *keys, lengths[i]), lengths[i] + 1};
        *keys += lengths[i];
        __builtin_prefetch(&table->cells[batch[i].hash & table->mask]);
    }
    for (uint32_t i = 0; i < size; i++) {
        const struct cell *cell = &table->cells[batch[i].hash & table->mask];
        if (cell->row != 0) {
            const uint8_t *row = (uint8_t *)row_at(table, cell->row - 1);
            __builtin_prefetch(row);
            __builtin_prefetch(row + table->row_bytes - 1);
        }
    }
    return size;
}

static bool grow_cells(struct table *table, uint32_t count)
{
    struct cell *cells = calloc(count, sizeof *cells);
    if (!cells)
        return false;
    for (uint32_t i = 0; table->cells && i <= table->mask; i++) {
        if (table->cells[i].row == 0)
            continue;
        uint32_t to = table->cells[i].hash;
        while (cells[to & (count - 1)].row)
            to++;
        cells[to & (count - 1)] = table->cells[i];
    }
    free(table->cells);
    table->cells = cells;
    table->mask = count - 1;
    return true;
}

static bool grow_rows(struct table *table)
{
    size_t more = (table->chunk_count + 1) * sizeof *table->chunks;
    uint8_t **chunks = realloc(table->chunks, more);
    if (!chunks)
        return false;
    table->chunks = chunks;
    if (!(chunks[table->chunk_count] = malloc((size_t)CHUNK_ROWS * table->row_bytes)))
        return false;
    uint32_t first = table->chunk_count++ * CHUNK_ROWS;
    for (uint32_t i = CHUNK_ROWS; i-- > 0;) {
        row_at(table, first + i)->value = table->free_row;
        row_at(table, first + i)->size = 0;
        table->free_row = first + i;
    }
    return true;
}

/* Longer rows, each under its number. */
static bool widen_rows(struct table *table, uint32_t row_bytes)
{
    uint8_t **chunks = calloc(table->chunk_count + 1, sizeof *chunks);
    bool has_memory = chunks != NULL;
    for (uint32_t i = 0; has_memory && i < table->chunk_count; i++)
        has_memory = (chunks[i] = malloc((size_t)CHUNK_ROWS * row_bytes)) != NULL;
    for (uint32_t i = 0; chunks && i < table->chunk_count; i++) {
        if (has_memory)
            for (size_t row = 0; row < CHUNK_ROWS; row++)
                memcpy(chunks[i] + row * row_bytes, table->chunks[i] + row * table->row_bytes,
                       table->row_bytes);
        free(has_memory ? table->chunks[i] : chunks[i]);
    }
    free(has_memory ? table->chunks : chunks);
    if (has_memory) {
        table->chunks = chunks;
        table->row_bytes = row_bytes;
    }
    return has_memory;
}

static void take_out(struct table *table, struct cell *cell)
{
    struct row *row = row_at(table, cell->row - 1);
    row->value = table->free_row;
    row->size = 0;
    table->free_row = cell->row - 1;
    /* Those behind it that would not be found any more move up. */
    uint32_t to = (uint32_t)(cell - table->cells);
    for (uint32_t at = to + 1;; at++) {
        struct cell *next = &table->cells[at & table->mask];
        if (next->row == 0)
            break;
        if (((at - next->hash) & table->mask) >= ((at - to) & table->mask)) {
            table->cells[to & table->mask] = *next;
            to = at;
        }
    }
    table->cells[to & table->mask].row = 0;
    table->count--;
}

static bool put(struct table *table, const struct wanted *it, int64_t value)
{
    struct cell *cell = find(table, it);
    if (cell->row == 0) {
        if (table->free_row < 0 && !grow_rows(table))
            return false;
        *cell = (struct cell){it->hash, (uint32_t)table->free_row + 1};
        struct row *row = row_at(table, cell->row - 1);
        table->free_row = row->value;
        row->size = it->size;
        memcpy(row->key, it->key, it->size - 1u);
        table->count++;
    }
    row_at(table, cell->row - 1)->value = value;
    return true;
}

EXPORTED void kvt_table_free(void *handle)
{
    struct table *table = handle;
    for (uint32_t i = 0; i < table->chunk_count; i++)
        free(table->chunks[i]);
    free(table->chunks);
    free(table->cells);
    free(table);
}

EXPORTED void *kvt_table_new(uint64_t seed)
{
    struct table *table = calloc(1, sizeof *table);
    if (!table)
        return NULL;
    table->seed = seed;
    table->row_bytes = 16;
    table->free_row = -1;
    if (!grow_cells(table, CELLS_MIN)) {
        kvt_table_free(table);
        return NULL;
    }
    return table;
}

EXPORTED uint32_t kvt_table_count(const void *handle)
{
    return ((const struct table *)handle)->count;
}

/* values[i] of key i, or ABSENT; with `take`, what is found is taken out. The keys lie one after
 * the other, as everywhere here. */
EXPORTED void kvt_table_get(void *handle, const uint8_t *keys, const uint8_t *lengths,
                            uint32_t count, int64_t *values, int take)
{
    struct table *table = handle;
    struct wanted batch[AHEAD];
    for (uint32_t done = 0; done < count;) {
        uint32_t size = fetch(table, &keys, lengths + done, count - done, batch);
        for (uint32_t i = 0; i < size; i++, done++) {
            struct cell *cell = find(table, &batch[i]);
            values[done] = cell->row ? row_at(table, cell->row - 1)->value : ABSENT;
            if (cell->row && take)
                take_out(table, cell);
        }
    }
}

EXPORTED int64_t kvt_table_value_of(const void *handle, const uint8_t *key, uint32_t length)
{
    const struct table *table = handle;
    if (length > UINT8_MAX)
        return ABSENT;
    struct wanted it = {key, hash_of(table, key, length), (uint16_t)(length + 1)};
    const struct cell *cell = find(table, &it);
    return cell->row ? row_at(table, cell->row - 1)->value : ABSENT;
}

/* Raises marks[i] to `found` where key i is here, and to `missing` where it is not; a mark that is
 * higher stays. */
EXPORTED void kvt_table_mark(const void *handle, const uint8_t *keys, const uint8_t *lengths,
                             uint32_t count, uint8_t *marks, uint8_t found, uint8_t missing)
{
    const struct table *table = handle;
    struct wanted batch[AHEAD];
    for (uint32_t done = 0; done < count;) {
        uint32_t size = fetch(table, &keys, lengths + done, count - done, batch);
        for (uint32_t i = 0; i < size; i++, done++) {
            if (marks[done] >= found)
                continue;
            uint8_t mark = find(table, &batch[i])->row ? found : missing;
            if (marks[done] < mark)
                marks[done] = mark;
        }
    }
}

/* Key i has values[i] from now on. Returns how many were put: fewer than `count` without memory. */
EXPORTED uint32_t kvt_table_put(void *handle, const uint8_t *keys, const uint8_t *lengths,
                                uint32_t count, const int64_t *values)
{
    struct table *table = handle;
    uint32_t need = table->row_bytes;
    for (uint32_t i = 0; i < count; i++)
        if (KEY_AT + lengths[i] > need)
            need = (KEY_AT + lengths[i] + 7u) & ~7u;
    if (need > table->row_bytes && !widen_rows(table, need))
        return 0;
    uint64_t cells = table->mask + 1u;
    while (cells < 2 * ((uint64_t)table->count + count))
        cells *= 2;
    if (cells > UINT32_MAX || (cells > table->mask + 1u && !grow_cells(table, (uint32_t)cells)))
        return 0;
    struct wanted batch[AHEAD];
    for (uint32_t done = 0; done < count;) {
        uint32_t size = fetch(table, &keys, lengths + done, count - done, batch);
        for (uint32_t i = 0; i < size; i++, done++)
            if (!put(table, &batch[i], values[done]))
                return done;
    }
    return count;
}

/* Copies every key, one after the other, with its length and its value. */
EXPORTED void kvt_table_list(const void *handle, uint8_t *keys, uint8_t *lengths, int64_t *values)
{
    const struct table *table = handle;
    for (uint32_t i = 0; i < table->chunk_count * CHUNK_ROWS; i++) {
        const struct row *row = row_at(table, i);
        if (row->size == 0)
            continue;
        memcpy(keys, row->key, row->size - 1u);
        keys += row->size - 1u;
        *lengths++ = (uint8_t)(row->size - 1u);
        *values++ = row->value;
    }
}
