"""Each rank its own part of the data: shard(loader), shard(dataset) or shard(stream), and where an epoch stands.

    parts.py        shard(): which rank of how many this is, and which way for what
    sampler.py      map-style data: every rank its turns in one order of indices
    stream.py       data that can only be read: every rank its turns in one order of samples
    loader.py       the user's DataLoader with either of them in it, counting what it hands over
    position.py     epochs and positions, counted over all ranks together; how many epochs a loader has begun
    seeds.py        the one seed of all ranks: rank 0's
    same_batch.py   fingerprint(): were ranks fed the same batch by mistake?
"""

from zeor.data.parts import shard
from zeor.data.same_batch import fingerprint
from zeor.data.sampler import RankSampler
from zeor.data.stream import RankStream

__all__ = ["RankSampler", "RankStream", "fingerprint", "shard"]
