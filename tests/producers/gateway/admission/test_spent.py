"""What a gateway remembers of accounts whose minute is used up."""

from __future__ import annotations

import pytest

from producers.gateway.admission import limits as admission
from producers.gateway.admission.limits import Spent
from producers.store.access.api_keys import TENANT, Account, Limits
from producers.store.usage.limits import Charge

KEY, ACME = Account("k" * 16, Limits(rpm=3, tpm=50)), Account(f"{TENANT}acme", Limits(rpm=5))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def told(said: str, whose: int, left: int, most: int, *accounts: Account) -> Charge:
    return Charge(accounts, answer=[said, whose, 20_000, left, most, 7, 50])


def test_what_is_used_up_is_told_until_the_minute_ends() -> None:
    clock = Clock()
    noted = Spent(clock)
    noted.note(told("new", 0, 1, 3, KEY))
    assert not noted, "something is left"
    noted.note(told("rpm", 0, 0, 3, KEY))
    clock.now += 5
    charge = noted.charge_of(KEY)
    assert charge is not None
    assert charge.answer == ["rpm", 0, 15_000, 0, 3, 7, 50]
    assert noted.charge_of(ACME) is None
    clock.now += 15
    assert noted.charge_of(KEY) is None
    assert not noted


def test_a_limit_that_was_raised_or_removed_goes_before_what_is_noted() -> None:
    noted = Spent(Clock())
    noted.note(told("rpm", 0, 0, 3, KEY))
    assert noted.charge_of(KEY._replace(limits=Limits(rpm=4))) is None
    assert noted.charge_of(KEY._replace(limits=Limits(tpm=1))) is None
    assert noted.charge_of(KEY._replace(limits=Limits(rpm=2))) is not None


@pytest.mark.parametrize(
    ("charge", "used_up"),
    [
        (told("new", 1, 0, 5, KEY, ACME), ACME),
        (told("new", 1, 0, 3, KEY, ACME), KEY),
        (told("rpm", 1, 0, 3, KEY, ACME), ACME),
        (told("refused", 1, 0, 3, KEY, ACME), ACME),
        (told("refused", -1, 0, 3, KEY, ACME), None),
        (told("tpm", 0, 0, 3, KEY, ACME), None),
        (told("new", 1, 0, 5, ACME, ACME._replace(name=f"{TENANT}other")), None),
    ],
)
def test_which_account_is_used_up_is_known_where_the_store_has_said_it(charge: Charge, used_up: Account | None) -> None:
    noted = Spent(Clock())
    noted.note(charge)
    assert [one for one in (KEY, ACME) if noted.charge_of(one) is not None] == ([used_up] if used_up else [])


def test_no_more_accounts_are_noted_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_NOTED", 2)
    noted = Spent(Clock())
    keys = [KEY._replace(name=name) for name in "abc"]
    for account in keys:
        noted.note(told("rpm", 0, 0, 3, account))
    assert [noted.charge_of(one) is not None for one in keys] == [False, True, True]
