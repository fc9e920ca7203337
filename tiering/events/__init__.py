"""What can be had where, told to whoever keeps an index of it, such as a router.

Two vocabularies: `chunks` is the core's, by key and tier; `blocks` is what goes over the wire, in
vLLM's form. `publisher` and `subscriber` are the two ends of the wire, and need the extra `events`;
`mirror` is an index made of what a subscriber reads. Only the core's is imported here.
"""

from tiering.events.chunks import (
    HOST,
    ChunksCleared,
    ChunksRemoved,
    ChunksStored,
    Event,
    EventSink,
    NoEvents,
    SurveyBegan,
    SurveyEnded,
)

__all__ = [
    "HOST",
    "ChunksCleared",
    "ChunksRemoved",
    "ChunksStored",
    "Event",
    "EventSink",
    "NoEvents",
    "SurveyBegan",
    "SurveyEnded",
]
