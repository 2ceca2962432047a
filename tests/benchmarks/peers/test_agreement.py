from benchmarks.peers.agreement import lines_of
from benchmarks.peers.results import Answer


def test_answers_are_compared_from_their_beginning():
    texts = {"ours": " Paris. It", "vllm": " Paris is", "peft-float32": " Paris. It"}
    lines = lines_of({server: Answer(server, text) for server, text in texts.items()})
    assert "10 of 10 characters" in lines[0]
    assert "6 of 10 characters" in lines[1]
    assert "characters" not in lines[2]


def test_without_the_reference_answers_are_only_shown():
    assert lines_of({"ours": Answer("ours", " Paris")}) == ["  ours              ' Paris'"]
