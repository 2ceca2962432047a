from gateway.adapters.names import BELIEVED_S, NAMES_MAX, Meaning, Names, Version

ONE = Meaning(Version("one", "1" * 64, "0" * 64, "base"))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_meaning_is_believed_for_a_moment() -> None:
    clock = Clock()
    names = Names(clock)
    names.put("acme", "pirate", ONE, names.changes)
    assert names.get("acme", "pirate") == ONE
    assert names.get("other", "pirate") is None
    assert names.get("acme", "lawyer") is None
    clock.now += BELIEVED_S
    assert names.get("acme", "pirate") is None


def test_a_change_is_noticed_at_once() -> None:
    names = Names()
    names.put("acme", "pirate", ONE, names.changes)
    names.changed("acme")
    assert names.get("acme", "pirate") is None


def test_a_change_is_no_matter_of_other_tenants() -> None:
    names = Names()
    names.put("acme", "pirate", ONE, names.changes)
    names.changed("other")
    assert names.get("acme", "pirate") == ONE


def test_an_answer_from_before_a_change_is_not_believed() -> None:
    names = Names()
    asked_at = names.changes
    names.changed("acme")
    names.put("acme", "pirate", ONE, asked_at)
    assert names.get("acme", "pirate") is None


def test_it_remembers_no_more_than_its_limit() -> None:
    names = Names()
    for number in range(NAMES_MAX + 1):
        names.put("acme", str(number), ONE, names.changes)
    assert names.get("acme", "0") is None
    assert names.get("acme", str(NAMES_MAX)) == ONE
