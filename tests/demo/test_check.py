import pytest

from gateway.demo.check import Answer, Finding, judge, report, table
from gateway.demo.content import BASE_NAME, QUESTIONS, TENANTS, shows_style

STYLED = {
    "pirate": "Arr, it be Paris, matey!",
    "json": '{"topic": "geography", "answer": "Paris"}',
    "legal": "It is hereby stated, pursuant to the inquiry, that it is Paris.",
    BASE_NAME: "The capital of France is Paris.",
}


def conversation(**changed: str) -> list[Answer]:
    texts = STYLED | changed
    return [
        Answer(tenant.slug, model, question, list(texts[model]), streamed=True)
        for tenant in TENANTS
        for model in (*tenant.adapters, BASE_NAME)
        for question in QUESTIONS
    ]


def failures(findings: list[Finding]) -> list[str]:
    return [finding.fact for finding in findings if not finding.holds]


def test_the_styles_of_the_demo_adapters_are_told_apart() -> None:
    for model, text in STYLED.items():
        shown = [style for style in ("pirate", "json", "legal") if shows_style(style, text)]
        assert shown == ([] if model == BASE_NAME else [model])


def test_a_conversation_in_style_passes() -> None:
    assert failures(judge(conversation())) == []


@pytest.mark.parametrize("adapter", ["pirate", "json", "legal"])
def test_an_adapter_that_answers_like_the_base_model_fails(adapter: str) -> None:
    found = failures(judge(conversation(**{adapter: STYLED[BASE_NAME]})))
    assert len(found) == 1
    assert adapter in found[0]


def test_a_base_model_that_answers_like_an_adapter_fails() -> None:
    answers = conversation(**{BASE_NAME: STYLED["pirate"]})
    assert failures(judge(answers)) == ["the base model answers in none of them"]


def test_an_adapter_that_was_not_asked_fails() -> None:
    answers = [answer for answer in conversation() if answer.model != "legal"]
    assert failures(judge(answers)) == ["globex/legal answers in its style"]


def test_a_stream_that_came_in_one_piece_fails() -> None:
    first, *others = conversation()
    whole = Answer(first.tenant, first.model, first.question, [first.text], streamed=True)
    assert failures(judge([whole, *others])) == ["streams arrive piece by piece"]


def test_the_table_shows_the_first_line_of_every_answer() -> None:
    shown = table(conversation(pirate="\nArr!\nAnd more, matey." + 100 * "x"))
    assert f"  {'acme/pirate':<30}  Arr!\n" in shown
    assert "And more" not in shown
    assert all(question in shown for question in QUESTIONS)
    assert f"globex/{BASE_NAME}" in shown


def test_the_report_gives_the_reason_of_what_failed() -> None:
    findings = [Finding("one holds", True, "unused"), Finding("another does not", False, "got 200")]
    assert report(findings) == "OK      one holds\nFAILED  another does not: got 200"
