/* Changes of the states and pins of many slots at once, with their counts. See slots.py.
 *
 * The rules are the caller's: what a state becomes is read from a table of its. A batch that is
 * refused is left as it was. Slots of one call differ.
 */
#include <stdint.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))

/* slots.py has the same fields. `of_state` counts slots by state; `held` those with a pin of each
 * kind; `evictable` those in the state `ready` without any pin. */
struct slots {
    int64_t count;
    uint8_t *states;
    int32_t *pins[2];
    int64_t *of_state;
    int64_t *held;
    int64_t *evictable;
    int32_t ready;
    int32_t free;
    int32_t doomed;
    int32_t illegal;
};

#define REFUSED (-1)

static int is_there(const struct slots *all, int64_t slot)
{
    return 0 <= slot && slot < all->count;
}

static int is_pinned(const struct slots *all, int64_t slot)
{
    return (all->pins[0][slot] | all->pins[1][slot]) != 0;
}

/* Each state becomes next[state]. Copies to `freed` the slots that became free and returns how many;
 * REFUSED where there is no such slot, a state would become `illegal`, or a slot with a pin free. */
EXPORTED int64_t kvt_slots_move(struct slots *all, const int64_t *slots, uint32_t count,
                                const uint8_t *next, int64_t *freed)
{
    for (uint32_t i = 0; i < count; i++) {
        if (!is_there(all, slots[i]))
            return REFUSED;
        uint8_t after = next[all->states[slots[i]]];
        if (after == all->illegal || (after == all->free && is_pinned(all, slots[i])))
            return REFUSED;
    }
    int64_t found = 0;
    for (uint32_t i = 0; i < count; i++) {
        int64_t slot = slots[i];
        uint8_t before = all->states[slot], after = next[before];
        all->states[slot] = after;
        all->of_state[before]--;
        all->of_state[after]++;
        if (!is_pinned(all, slot))
            *all->evictable += (after == all->ready) - (before == all->ready);
        if (after == all->free)
            freed[found++] = slot;
    }
    return found;
}

EXPORTED int64_t kvt_slots_pin(struct slots *all, const int64_t *slots, uint32_t count, int kind)
{
    for (uint32_t i = 0; i < count; i++)
        if (!is_there(all, slots[i]))
            return REFUSED;
    for (uint32_t i = 0; i < count; i++) {
        int64_t slot = slots[i];
        if (all->states[slot] == all->ready && !is_pinned(all, slot))
            --*all->evictable;
        all->held[kind] += all->pins[kind][slot]++ == 0;
    }
    return 0;
}

/* Copies to `gone` the doomed slots that have no pin any more and returns how many; REFUSED where a
 * slot has no pin of this kind. */
EXPORTED int64_t kvt_slots_unpin(struct slots *all, const int64_t *slots, uint32_t count, int kind,
                                 int64_t *gone)
{
    for (uint32_t i = 0; i < count; i++)
        if (!is_there(all, slots[i]) || all->pins[kind][slots[i]] < 1)
            return REFUSED;
    int64_t found = 0;
    for (uint32_t i = 0; i < count; i++) {
        int64_t slot = slots[i];
        all->held[kind] -= --all->pins[kind][slot] == 0;
        if (is_pinned(all, slot))
            continue;
        *all->evictable += all->states[slot] == all->ready;
        if (all->states[slot] == all->doomed)
            gone[found++] = slot;
    }
    return found;
}
