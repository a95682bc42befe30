# SPDX-License-Identifier: MIT OR Apache-2.0
"""A machine without the module, for tests of programs that use p2pmem.

::

    from p2pmem.fake import Fake

    fake = Fake.example()
    with fake.device() as device, device.alloc(4096, near="0000:04:00.0") as buffer:
        assert buffer.provider == 1
    fake.fail_next(errno.ENOSPC)
"""

from ._native import Fake

__all__ = ["Fake"]
