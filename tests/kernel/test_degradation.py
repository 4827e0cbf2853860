"""What is given up when memory or disk run short, and that nothing flaps."""

from __future__ import annotations

import pytest

from sparrow.kernel.degradation import GIVEN_UP, Degradation, ServiceLevel, Strain, refusal
from sparrow.model.errors import InMaintenance, LoadShed, StorageFull
from sparrow.model.flow import PublisherClass

SECOND_US = 1_000_000
MIB = 1024 * 1024
DISK = 1000 * 1024 * MIB
CALM = Strain(0.1, DISK // 2, DISK)


def levels(degradation: Degradation, strain: Strain, seconds: int, start_s: int) -> ServiceLevel:
    level = degradation.level
    for second in range(seconds):
        level = degradation.observe(strain, (start_s + second) * SECOND_US)
    return level


@pytest.mark.parametrize(
    ("strain", "expected"),
    [
        (CALM, ServiceLevel.NORMAL),
        (CALM._replace(memory_share=0.85), ServiceLevel.THROTTLED),
        (CALM._replace(memory_share=0.97), ServiceLevel.EMERGENCY),
        (CALM._replace(disk_free_bytes=900 * MIB), ServiceLevel.THROTTLED),
        (CALM._replace(disk_free_bytes=100 * MIB), ServiceLevel.READ_ONLY),
        (CALM._replace(disk_free_bytes=0), ServiceLevel.READ_ONLY),
        (CALM._replace(disk_free_bytes=0, disk_bytes=0), ServiceLevel.NORMAL),
    ],
)
def test_the_level_follows_what_runs_short(strain: Strain, expected: ServiceLevel) -> None:
    assert levels(Degradation(1024 * MIB, 256 * MIB), strain, 5, 0) is expected


def test_one_bad_look_changes_nothing() -> None:
    degradation = Degradation(1024 * MIB, 256 * MIB)
    degradation.observe(CALM._replace(memory_share=0.99), 0)
    assert degradation.observe(CALM, SECOND_US) is ServiceLevel.NORMAL


def test_a_small_disk_is_judged_by_its_share() -> None:
    small = 64 * MIB
    degradation = Degradation(1024 * MIB, 256 * MIB)
    assert levels(degradation, Strain(0.1, small // 2, small), 5, 0) is ServiceLevel.NORMAL
    assert levels(degradation, Strain(0.1, small // 100, small), 5, 5) is ServiceLevel.READ_ONLY


def test_a_level_ends_when_there_is_clearly_more_again_and_that_has_held() -> None:
    degradation = Degradation(1024 * MIB, 256 * MIB)
    levels(degradation, CALM._replace(disk_free_bytes=100 * MIB), 5, 0)
    barely = CALM._replace(disk_free_bytes=300 * MIB)
    assert levels(degradation, barely, 60, 5) is ServiceLevel.READ_ONLY
    assert levels(degradation, CALM, 5, 65) is ServiceLevel.READ_ONLY
    assert levels(degradation, CALM, 15, 70) is ServiceLevel.NORMAL


def test_the_gravest_level_is_in_force_and_an_operator_has_the_last_word() -> None:
    degradation = Degradation(1024 * MIB, 256 * MIB)
    worst = Strain(0.99, 0, DISK)
    assert levels(degradation, worst, 5, 0) is ServiceLevel.EMERGENCY
    degradation.is_maintained = True
    assert degradation.level is ServiceLevel.MAINTENANCE
    degradation.is_maintained = False
    assert degradation.level is ServiceLevel.EMERGENCY


@pytest.mark.parametrize(
    ("level", "kind", "error"),
    [
        (ServiceLevel.NORMAL, PublisherClass.BULK, None),
        (ServiceLevel.THROTTLED, PublisherClass.BULK, LoadShed),
        (ServiceLevel.THROTTLED, PublisherClass.NORMAL, None),
        (ServiceLevel.READ_ONLY, PublisherClass.CRITICAL, StorageFull),
        (ServiceLevel.EMERGENCY, PublisherClass.CRITICAL, LoadShed),
        (ServiceLevel.MAINTENANCE, PublisherClass.CRITICAL, InMaintenance),
    ],
)
def test_who_is_refused_at_which_level(
    level: ServiceLevel, kind: PublisherClass, error: type[Exception] | None
) -> None:
    found = refusal(level, kind)
    assert found is None if error is None else isinstance(found, error)


def test_every_level_says_what_it_gives_up() -> None:
    assert set(GIVEN_UP) == set(ServiceLevel)
    assert [level for level in ServiceLevel if not GIVEN_UP[level]] == [ServiceLevel.NORMAL]
