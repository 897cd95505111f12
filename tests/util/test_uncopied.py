"""A value that belongs to a module and not to its copies."""

from __future__ import annotations

import copy
import pickle

from torch import nn

from hookline.util.uncopied import Uncopied


def test_neither_a_copy_nor_a_pickle_of_a_module_has_the_value() -> None:
    module = nn.Linear(2, 2)
    module.held = Uncopied(value=lambda: None, made="here")  # a function in a function cannot be pickled
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert isinstance(twin.held, Uncopied)
        assert twin.held.value is None and twin.held.made is None
    assert module.held.value is not None and module.held.made == "here"
