"""Keys are known by their hash; what they may is counted, and told to whoever comes too soon."""

from pathlib import Path

import msgspec
import pytest
import tomli_w

from weft.clock import VirtualClock
from weft.errors import ConfigError
from weft.serve import keys as keys_file
from weft.serve.failures import Fault
from weft.serve.keys import DAY_S, Admission, Key, KeysOfFile, Limits, load_keys, new_key, save_keys


def admission(clock: VirtualClock, **limits: object) -> tuple[Admission, str]:
    secret, key = new_key("anna", **limits)
    return Admission((new_key("other")[1], key), Limits(), clock), f"Bearer {secret}"


def refusal(admission: Admission, bearer: str) -> Fault:
    with pytest.raises(Fault) as refused:
        admission.admit(admission.asker(bearer, "10.0.0.1"))
    return refused.value


def test_a_file_of_keys_holds_no_key(tmp_path: Path) -> None:
    secret, key = new_key("anna", tokens_per_day=5, models=["a"], expires="2030-01-01T00:00:00Z")
    path = tmp_path / "serve.keys"
    save_keys(path, [key])
    assert load_keys(path) == (key,)
    assert path.stat().st_mode & 0o077 == 0
    tree = {"name": key.name, "salt": key.salt, "hash": key.hash, "tokens_per_day": 5, "models": ["a"]}
    path.write_bytes(tomli_w.dumps({"key": [tree | {"expires": key.expires}]}).encode())
    assert load_keys(path) == (key,)
    assert secret not in path.read_text()
    for fault in (
        "[[key]]\nname = 'a'",
        tomli_w.dumps({"key": [tree, tree]}),
        "key = 3",
        tomli_w.dumps({"key": [tree | {"limit": 1}]}),
    ):
        path.write_text(fault)
        with pytest.raises(ConfigError):
            load_keys(path)


def test_who_has_no_key_or_a_wrong_one_is_refused() -> None:
    clock = VirtualClock()
    gate, bearer = admission(clock)
    for given in (None, "", "Bearer", "Bearer sk-weft-0", f"Basic {bearer[7:]}", bearer[:-1]):
        with pytest.raises(Fault) as refused:
            gate.asker(given, "127.0.0.1")
        assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
        assert "sk-weft-0" not in str(refused.value)
    assert gate.asker(bearer, "10.0.0.1").name == "anna"


def test_a_key_that_was_taken_is_found_at_once_until_the_keys_change(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [new_key(f"key-{number}") for number in range(50)]
    clock = VirtualClock()
    admission = Admission(tuple(key for _, key in made), Limits(), clock)
    hashed, hash_of = list[str](), keys_file._hash
    monkeypatch.setattr(keys_file, "_hash", lambda secret, salt: hashed.append(salt) or hash_of(secret, salt))

    def num_hashed(secret: str) -> int:
        hashed.clear()
        assert admission.asker(f"Bearer {secret}", "127.0.0.1").name == "key-7"
        return len(hashed)

    secret = made[7][0]
    assert num_hashed(secret) >= 50
    assert num_hashed(secret) <= 3
    with pytest.raises(Fault):
        admission.asker(f"Bearer {secret}x", "127.0.0.1")
    admission._keys = tuple(key for _, key in made if key.name != "key-7")
    with pytest.raises(Fault):  # it was taken away
        admission.asker(f"Bearer {secret}", "127.0.0.1")


def test_a_key_ends_when_it_says() -> None:
    clock = VirtualClock()
    gate, bearer = admission(clock, expires="2023-11-14T22:13:30Z")  # ten seconds after the clock's begin
    gate.asker(bearer, "x")
    clock.advance(11)
    with pytest.raises(Fault, match="no more"):
        gate.asker(bearer, "x")


def test_a_key_is_for_some_models() -> None:
    gate, bearer = admission(VirtualClock(), models=["small"])
    asker = gate.asker(bearer, "x")
    gate.check_model(asker, "small")
    with pytest.raises(Fault) as refused:
        gate.check_model(asker, "large")
    assert refused.value.status == 403
    assert not gate.may_see(asker, "large")


def test_requests_of_a_minute_are_counted_and_come_back() -> None:
    clock = VirtualClock()
    gate, bearer = admission(clock, requests_per_minute=2)
    for _ in range(2):
        gate.admit(gate.asker(bearer, "x")).end()
    fault = refusal(gate, bearer)
    assert (fault.status, fault.code, fault.headers["retry-after"]) == (429, "rate_limit_exceeded", "30")
    assert fault.headers["x-ratelimit-limit-requests"] == "2"
    assert fault.headers["x-ratelimit-remaining-requests"] == "0"
    clock.advance(30)
    gate.admit(gate.asker(bearer, "x")).end()
    refusal(gate, bearer)


def test_tokens_are_a_debt_that_is_paid_before_the_next_request() -> None:
    clock = VirtualClock()
    gate, bearer = admission(clock, tokens_per_minute=60)
    visit = gate.admit(gate.asker(bearer, "x"))
    visit.check(60)
    with pytest.raises(Fault) as refused:
        visit.check(61)
    assert refused.value.headers["x-should-retry"] == "false"
    visit.charge(90)
    visit.end()
    assert refusal(gate, bearer).headers["retry-after"] == "31"
    clock.advance(31)
    gate.admit(gate.asker(bearer, "x")).end()


def test_a_day_has_its_tokens() -> None:
    clock = VirtualClock()
    gate, bearer = admission(clock, tokens_per_day=10)
    with gate.admit(gate.asker(bearer, "x")) as visit:
        visit.charge(10)
    fault = refusal(gate, bearer)
    assert (fault.code, fault.headers["x-should-retry"]) == ("insufficient_quota", "false")
    clock.advance(DAY_S)
    gate.admit(gate.asker(bearer, "x")).end()


def test_so_many_at_a_time_and_an_end_counts_once() -> None:
    gate, bearer = admission(VirtualClock(), concurrent=1)
    visit = gate.admit(gate.asker(bearer, "x"))
    assert refusal(gate, bearer).status == 429
    visit.end()
    visit.end()
    gate.admit(gate.asker(bearer, "x"))
    refusal(gate, bearer)


def test_without_keys_an_address_has_four_at_a_time_and_this_machine_any() -> None:
    gate = Admission(None, Limits(), VirtualClock())
    for _ in range(4):
        gate.admit(gate.asker(None, "10.0.0.1"))
    with pytest.raises(Fault, match=r"10\.0\.0\.1"):
        gate.admit(gate.asker(None, "10.0.0.1"))
    gate.admit(gate.asker(None, "10.0.0.2"))
    for _ in range(40):
        gate.admit(gate.asker(None, "127.0.0.1"))


def test_addresses_leave_nothing_behind() -> None:
    gate = Admission(None, Limits(), VirtualClock())
    for number in range(300):
        gate.admit(gate.asker(None, f"10.0.{number // 200}.{number % 200}")).end()
    assert not gate._accounts


def test_pages_are_shared_by_who_has_the_same_secret_alone() -> None:
    clock = VirtualClock()
    secrets = [new_key(name) for name in ("a", "b")]
    gate = Admission(tuple(key for _, key in secrets), Limits(), clock)
    one, other = (gate.asker(f"Bearer {secret}", "x").secret for secret, _ in secrets)
    assert one != other


@pytest.mark.parametrize(("priority", "room"), [("low", 0.25), ("normal", 0.75), ("high", 1.0)])
def test_priority_is_room_in_the_queue(priority: str, room: float) -> None:
    gate, bearer = admission(VirtualClock(), priority=priority)
    assert gate.asker(bearer, "x").room == room


def test_names_are_such_as_logs_can_hold() -> None:
    assert isinstance(new_key("a.b@c-d_e")[1], Key)
    with pytest.raises(ValueError, match="name"):
        new_key("a b\n")


def test_a_file_that_changes_is_read_again_and_new_limits_hold(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", VirtualClock()
    secret, key = new_key("anna", requests_per_minute=1)
    save_keys(path, [key])
    admission = Admission(KeysOfFile(path), Limits(), clock)

    def ask() -> None:
        admission.admit(admission.asker(f"Bearer {secret}", "")).end()

    ask()
    with pytest.raises(Fault, match="Rate limit: 1 request a minute"):
        ask()
    save_keys(path, [msgspec.structs.replace(key, requests_per_minute=2)])
    ask()
    ask()
    with pytest.raises(Fault, match="2 requests a minute"):
        ask()
    path.write_text("key = [")
    with pytest.raises(Fault, match="2 requests a minute"):
        ask()
    save_keys(path, [])
    with pytest.raises(Fault, match="not known here"):
        ask()
