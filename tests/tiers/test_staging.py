from __future__ import annotations

import numpy as np
import pytest

from worldpager.errors import ClosedError, WorldPagerError
from worldpager.tiers.arena import Arena
from worldpager.tiers.staging import HostStaging, Staging


def test_on_the_host_nothing_is_copied() -> None:
    arena = Arena(8192)
    staging: Staging = HostStaging()
    image = arena.view(4096, 4096)
    assert not staging.ready(7)
    assert staging.stage(7, image)
    assert staging.stage(7, arena.view(0, 4096)), "staged already: stays as it is"
    assert staging.ready(7)
    image[:] = 5
    taken = staging.take(7)
    assert taken.data_ptr() == image.ctypes.data
    assert np.shares_memory(taken.numpy(), image)
    assert (staging.budget, staging.used, staging.keeps_source) == (0, 0, True)
    staging.release(7)
    staging.release(7)
    with pytest.raises(WorldPagerError, match="7 is not staged"):
        staging.take(7)
    staging.stage(8, image)
    staging.close()
    staging.close()
    assert not staging.ready(8)
    with pytest.raises(ClosedError):
        staging.stage(9, image)
