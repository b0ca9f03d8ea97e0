"""Cards with the experiments of `fake_experiments`, for tests of everything around cards."""

from __future__ import annotations

from dataclasses import replace

from meshwright_practice.cards.card import Card, Citation, Experiment, Knob, Prediction, Relation, Statement

PACKAGE = "fake_experiments"
DOUBLE = Experiment("small:double", 1, (Knob("size", (8, 16), "bytes of the buffer"),))
IS_TWICE = Relation("Twice the size is sent.", "doubled", "==", 16.0)
PREDICTED = Card(
    "fake-double",
    "communication",
    "How many bytes are sent for `size` bytes?",
    "Twice the size.",
    "Every byte is sent twice.",
    "Every byte is sent once.",
    DOUBLE,
    (IS_TWICE,),
    predictions=(Prediction("doubled", "Bytes that are sent", "bytes"),),
    refuted=(Relation("As many bytes as the size are sent.", "doubled", "==", "size"),),
    sources=(Citation("own run", "this test", "pytest"),),
    items=(1,),
)
CLAIMS = (
    Statement("More is sent than the size.", Relation("More.", "doubled", ">", "size")),
    Statement("Less is sent than the size.", Relation("Less.", "doubled", "<", "size")),
    Statement("Nothing is sent.", Relation("Nothing.", "doubled", "==", 0.0)),
    Statement("Sixteen bytes are sent.", Relation("Sixteen.", "doubled", "==", 16.0)),
)
CHOSEN = replace(PREDICTED, id="fake-claims", kind="judgement", predictions=(), claims=CLAIMS)
WRONG = replace(PREDICTED, id="fake-wrong", relations=(replace(IS_TWICE, right=17.0),))
HANGING = replace(PREDICTED, id="fake-hang", experiment=Experiment("small:hang"))
PICTURED = replace(
    PREDICTED,
    id="fake-pictures",
    kind="schedule",
    question="<img src=x onerror=alert(1)> What is `drawn`?",
    experiment=Experiment(
        "small:picture", 1, (Knob("picture", ("bars", "timeline", "heat map", "curves"), "what is drawn"),)
    ),
    predictions=(),
    claims=CLAIMS,
    chapter="handbook/sharding.md",
)
SLOW = replace(PREDICTED, id="fake-slow", experiment=Experiment("small:slow"))
DECK = {card.id: card for card in (PREDICTED, CHOSEN, WRONG, HANGING)}
