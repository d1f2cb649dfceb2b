"""The public names and where they are defined: type checkers and `lazy_names` read this file."""

from raysgd.replay.bisecting import Difference as Difference
from raysgd.replay.bisecting import bisect as bisect
from raysgd.replay.jumps import JumpsFound as JumpsFound
from raysgd.replay.jumps import find_jumps as find_jumps
from raysgd.replay.questions import Why as Why
from raysgd.replay.questions import why as why
from raysgd.replay.replaying import Replayed as Replayed
from raysgd.replay.replaying import replay as replay
