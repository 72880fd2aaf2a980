"""What the state machines of stores have in common: a directory, a store that a subclass opens there, its chains."""

from __future__ import annotations

import shutil

from hypothesis.stateful import RuleBasedStateMachine

from rekindle.store.warm import WarmStore
from tests.store.chains import Chain, fast_directory


class StoreMachine(RuleBasedStateMachine):
    """The store is opened by a rule of the subclass, and closed at the end."""

    store: WarmStore | None = None

    def __init__(self) -> None:
        super().__init__()
        self.directory = fast_directory()

    def teardown(self) -> None:
        if self.store is not None:
            self.store.close()
        shutil.rmtree(self.directory)

    def chain(self, ids: list[int]) -> Chain:
        assert self.store is not None
        return Chain.of(self.store, ids)
