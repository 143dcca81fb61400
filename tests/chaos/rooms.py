"""Rooms: what a run trains with, where its snapshots go, and who keeps them.

What decides about the bits of a run comes from one table, so that a few dozen uninterrupted
references serve all cases; the rest is drawn freely.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from tests.campaign.cases import Settings

PLAIN, LIGHTNING, ACCELERATE, TRANSFORMERS = "plain", "lightning", "accelerate", "transformers"
SPLIT = "accelerate split batches"
EXAMPLES = {
    PLAIN: "char_gpt",
    LIGHTNING: "lightning_gpt",
    ACCELERATE: "accelerate_gpt",
    SPLIT: "accelerate_gpt",
    TRANSFORMERS: "transformers_gpt",
}
MODULES = {  # loaded before ranks are forked; with more, a thread of Arrow's allocator begins
    PLAIN: (),
    LIGHTNING: ("lightning", "lightning.pytorch.strategies"),
    ACCELERATE: ("accelerate",),
    SPLIT: ("accelerate",),
    TRANSFORMERS: ("transformers.modeling_utils", "transformers.training_args"),
}
LOCAL, DISK, POOR, S3, TIER = "local", "disk", "tmpfs-poor", "s3", "s3 tier"
NO_LINKS, LATE = "disk without links", "late file server"
ON_DISK = (DISK, POOR, NO_LINKS)
RANKS, RUN, DUMPS = "ranks", "trainckpt run", "dumps"
PARTNER, XOR, RS = "partner", "xor:4", "rs:2+2"
ACCUMULATE, NEVER = 3, 1_000_000
LATE_SHARE = 0.4

#        trainer, layout, ranks, workers, bf16
TABLE = (
    (PLAIN, "none", 1, 0, False),
    (PLAIN, "none", 1, 2, True),
    (PLAIN, "ddp", 2, 0, False),
    (PLAIN, "ddp", 2, 2, False),
    (PLAIN, "ddp", 3, 0, True),
    (PLAIN, "ddp", 4, 0, False),
    (PLAIN, "fsdp", 2, 0, False),
    (PLAIN, "fsdp", 3, 2, False),
    (PLAIN, "fsdp", 4, 0, True),
    (PLAIN, "hsdp", 2, 0, False),
    (PLAIN, "hsdp", 4, 0, False),
    (PLAIN, "tp", 2, 0, False),
    (PLAIN, "tp", 4, 0, False),
    (LIGHTNING, "none", 1, 2, False),
    (LIGHTNING, "ddp", 2, 0, False),
    (LIGHTNING, "fsdp", 2, 0, False),
    (ACCELERATE, "none", 1, 2, True),
    (ACCELERATE, "ddp", 2, 0, False),
    (SPLIT, "ddp", 2, 2, False),
    (TRANSFORMERS, "none", 1, 2, False),
    (TRANSFORMERS, "ddp", 2, 0, True),
)


@dataclass(frozen=True)
class Room:
    """What a case runs in.

    Attributes:
        hosts: Network and mount namespaces that the ranks are spread over.
        place: Where snapshots lie: a folder, the disk that can go wrong, that with hardly any
            shared memory or without hard links, a file server whose clients see each other's
            changes late, an object store, or a folder with the store as a slower tier.
        redundancy: As the option; with it saves go to memory at every step.
        save_every: Steps; `NEVER`.
        launcher: Bare ranks, or `trainckpt run`; `DUMPS`: that with process dumps, and
            `trainckpt resume` after it.
    """

    trainer: str
    layout: str
    ranks: int
    workers: int
    bf16: bool
    hosts: int
    place: str
    redundancy: str
    encrypted: bool
    survivors: bool
    save_every: int
    launcher: str

    @property
    def settings(self) -> Settings:
        return Settings(
            EXAMPLES[self.trainer],
            self.layout,
            self.ranks,
            ACCUMULATE,
            self.workers,
            0.1,
            self.save_every,
            4,
        )

    @property
    def reference(self) -> str:
        """The name of the uninterrupted run that this one has to equal."""
        bits = f"-{'bf16' if self.bf16 else 'fp32'}"
        trainer = self.trainer.replace(" ", "-")
        return f"{trainer}-{self.layout}{self.ranks}-w{self.workers}{bits}"

    @property
    def words(self) -> str:
        every = {1: "saves every step", NEVER: "no saves"}.get(self.save_every, "saves")
        parts = [
            f"{self.trainer} {self.layout} x{self.ranks}",
            *([f"{self.hosts} hosts"] if self.hosts > 1 else []),
            *(["workers"] if self.workers else []),
            *(["bf16"] if self.bf16 else []),
            self.place,
            *([self.redundancy] if self.redundancy != "none" else []),
            *(["encrypted"] if self.encrypted else []),
            *(["survivors"] if self.survivors else []),
            every,
            self.launcher,
        ]
        return ", ".join(parts)

    @property
    def rooms(self) -> list[str]:
        """What it is counted under."""
        return [
            self.trainer,
            self.layout,
            f"{self.hosts} host{'s' if self.hosts > 1 else ''}",
            self.place,
            *([self.redundancy] if self.redundancy != "none" else []),
            *(name for name in ("bf16", "encrypted", "survivors") if getattr(self, name)),
            *(["workers"] if self.workers else []),
            {1: "save every step", NEVER: "save never"}.get(self.save_every, "save few"),
            self.launcher,
        ]


def without_saves(room: Room) -> Room:
    """The room with the same bits where nothing is saved but the end."""
    bare = {"hosts": 1, "place": LOCAL, "redundancy": "none", "encrypted": False}
    return replace(room, **bare, survivors=False, save_every=NEVER, launcher=RANKS)


def with_dumps(room: Room) -> Room:
    """The room on one host, where processes are dumped: into a folder, as nowhere else."""
    place = TIER if room.place in (S3, TIER) else LOCAL
    return replace(room, hosts=1, redundancy="none", place=place, launcher=DUMPS)


def draw(random: Random, among: list[str] = ()) -> Room:
    """A room; with `among`, one that is counted under one of these names.

    Rooms with dumps come only if they are among them.
    """
    while True:
        room = _any(random)
        if DUMPS in among:
            room = with_dumps(room)
        if not among or set(among) & set(room.rooms):
            return room


def _any(random: Random) -> Room:
    trainer, layout, ranks, workers, bf16 = random.choice(TABLE)
    hosts = random.choice([1, ranks]) if trainer == PLAIN and layout != "none" else 1
    place = random.choices([LOCAL, DISK, POOR, NO_LINKS, S3, TIER], [4, 7, 2, 2, 4, 2])[0]
    if hosts > 1 and place in (S3, TIER):
        place = DISK  # a server on 127.0.0.1 is on none of them
    redundancy = "none"
    if hosts > 1 and random.random() < 0.7:
        redundancy = random.choice([PARTNER, *([XOR, RS] if hosts == 4 else [])])
    survivors = layout == "ddp" and trainer == PLAIN and place != S3 and random.random() < 0.4
    launcher = RUN if hosts == 1 and random.random() < 0.15 else RANKS
    room = Room(
        trainer,
        layout,
        ranks,
        workers,
        bf16,
        hosts,
        place,
        redundancy,
        encrypted=random.random() < 0.2,
        survivors=survivors,
        save_every=random.choices([1, 3, NEVER], [4, 3, 1])[0],
        launcher=launcher,
    )
    is_late = hosts > 1 and place == DISK and Random(room.words).random() < LATE_SHARE
    return replace(room, place=LATE) if is_late else room
