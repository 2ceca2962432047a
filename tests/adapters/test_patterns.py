import re
import time

import pytest

from gateway.adapters.patterns import UnboundedPattern, compile_bounded, count_ways

MODULE = "model.layers.12.self_attn.q_proj"


@pytest.mark.parametrize(
    "pattern",
    [
        "q_proj",
        "layers.12.self_attn.q_proj",
        r"model\.layers\.12\.self_attn\.q_proj",
        r".*\.(q_proj|k_proj|v_proj|o_proj)",
        r"layers\.([0-9]|1[0-9])\.self_attn\.(?:q|k)_proj",
        r"layers\.\d+\.self_attn\.[qk]_proj",
        r".*?self_attn.*?",
        r"layers\.1{1}2\.self_attn\.q_proj",
        r"(model\.)?layers\.12\.self_attn\.q_proj",
        r"layers\.[^]x]2\.self_attn\.q_proj",
    ],
)
def test_usual_patterns_match_as_in_re(pattern: str) -> None:
    template = r"(.*\.)?({})$"
    ours = compile_bounded(pattern, template).match(MODULE)
    theirs = re.match(template.replace("{}", pattern), MODULE)
    assert (ours is None) == (theirs is None)
    assert ours is not None or "self_attn" not in pattern


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(a+)+$", "repeats a group"),
        ("(a|a)*", "repeats a group"),
        ("(.*.*)*x", "repeats a group"),
        ("(a){2,}", "repeats a group"),
        ("(?:a|b){30}", "repeats a group"),
        (r"(q)\1", "refers back"),
        ("(?=a)q", "only"),
        ("(?P<x>a)", "only"),
        ("(?i)q_proj", "only"),
        ("((q_proj)", "not closed"),
        ("q_proj)", "not opened"),
        ("[a-", "not closed"),
        ("*a", "repeats nothing"),
        ("a**", "repeats nothing"),
        ("a{2,1}", "not a regular expression"),
        ("[z-a]", "not a regular expression"),
        ("x" * 1001, "longer than 1000"),
        (".*.*.*", "too many"),
        ("(a|b)" * 20, "too many"),
        ("a?" * 40, "too many"),
        ("[a-z]*" * 4, "too many"),
    ],
)
def test_hostile_and_broken_patterns_are_refused_with_the_reason(pattern: str, reason: str) -> None:
    with pytest.raises(UnboundedPattern, match=re.escape(reason)):
        compile_bounded(pattern)


def test_alternatives_add_up_and_sequences_multiply() -> None:
    assert count_ways("abc") == 1
    assert count_ways("(a|b|c)") == 3
    assert count_ways("(a|b)(c|d|e)") == 6
    assert count_ways("(a|(b|c)d)e") == 3
    assert count_ways("a|b|c") == 3


def test_the_worst_accepted_pattern_is_fast() -> None:
    worst = compile_bounded(r".*.*(a|b|c|d)", r"(.*\.)?({})$")
    begun = time.perf_counter()
    assert worst.match("m" * 60) is None
    assert time.perf_counter() - begun < 1.0
