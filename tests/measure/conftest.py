"""One thread per operator: tiny models gain nothing from more, and on a busy machine threads wait for each other."""

import pytest


@pytest.fixture(autouse=True)
def one_thread_per_operator():
    try:
        import torch
    except ImportError:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
