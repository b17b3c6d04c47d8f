"""The feed: composes store, order, packing and the ring.

config.py         what a user decides                  source.py       where batches come from
feed.py           what a rank iterates over            batch.py        what it gets
request.py        what one rank asks for               agreement.py    do all ranks want the same?
joining.py        becoming a member of a group         rendezvous.py   how they tell each other
feeder.py         starting the feeder process          process.py      the feeder process itself
hosting.py        bringing a ring up and filling it    producer.py     one batch after another
production.py     what a source is to the producer     items.py        an iterable of dicts
packed_tokens.py  token stores as a source             packed_batches.py  its micro batches, opened for one shard
corpora.py        which stores: one, or a blend        packed_order.py    which order over them
shard.py          any source, opened for one shard     resume.py       continuing from a checkpoint
stats.py          who waited for whom
digests.py        do all hosts read the same?
virtual_stages.py one feed for several chunks of layers
"""

from headrace.feed.batch import Batch
from headrace.feed.config import FeedConfig
from headrace.feed.feed import Feed
from headrace.feed.rendezvous import Alone, Rendezvous
from headrace.feed.source import Source, SourceContext
from headrace.feed.stats import FeedStats

__all__ = ["Alone", "Batch", "Feed", "FeedConfig", "FeedStats", "Rendezvous", "Source", "SourceContext"]
