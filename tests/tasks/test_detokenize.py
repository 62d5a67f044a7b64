"""Every rule of every detokenizer: one case or more for each, named by the rule. WikiText's are lm_eval's own."""

import pytest

from lm_eval_duel.tasks import corpora as detokenize

CASES = {
    "ptb": {
        "'s": ("the company 's plan", "the company's plan"),
        "s ' ": ("the workers ' plan", "the workers' plan"),
        "n't": ("they did n't go", "they didn't go"),
        "line break": ("one \n two", "one\ntwo"),
        "slash": (r"a 1\/2 share and\/or", "a 1/2 share and/or"),
        "N": ("rose N points", "rose 1 points"),
        "N N": ("in N N N N years", "in 1 1 1 1 years"),
        "N before a line break": ("with N \n then", "with N\nthen"),
        "N at the ends stays": ("N rose N", "N rose N"),
        "$ 1": ("paid $ N million", "paid $1 million"),
        "# 1": ("paid # N million", "paid #1 million"),
        "<unk>": ("mr. <unk> of <unk>", "mr. ? of ?"),
    },
    "lm1b": {
        "http": ("see http : / / www.x.org now", "see http://www.x.org now"),
        "https": ("see https : / / www.x.org now", "see https://www.x.org now"),
        "'word": ("he 's sure they 'll go", "he's sure they'll go"),
        "'word, digits": ("the '90s", "the'90s"),
        "' alone": ("the dogs ' tails", "the dogs ' tails"),
        "word .": ("It is over . Next", "It is over. Next"),
        "word . word .": ("so yes . no . Next", "so yes. no . Next"),
        ") . stays": ("over ) . Next", "over ) . Next"),
        "word . at the end": ("It is over .", "It is over."),
        "word . before a last line break": ("It is over .\n", "It is over.\n"),
        "first word": ("Over .", "Over ."),
        "?": ("Who ? Me", "Who? Me"),
        "? at the end": ("Who is it ?", "Who is it?"),
        "!": ("Stop ! Now", "Stop! Now"),
        "! at the end": ("Stop now !", "Stop now!"),
        ",": ("red , green , blue", "red, green, blue"),
        ":": ("one thing : this", "one thing: this"),
        ";": ("he came ; she saw", "he came; she saw"),
        "/": ("and / or", "and/or"),
        '"': ('he said " no way " twice', 'he said "no way" twice'),
        '" around a sentence': ('" It is over . "', '"It is over."'),
        "' around a sentence": ("' It is over . '", "'It is over.'"),
        '" two': ('" a " b " c "', '"a" b "c"'),
        '" one side': ('he said "no " twice', 'he said "no " twice'),
        '" two spaces': ('a "  no  " b', 'a " no " b'),
        "'": ("called ' it all ' here", "called 'it all' here"),
        "( )": ("a ( small ) one", "a (small) one"),
        "( ) two": ("( a ) b ( c )", "(a) b (c)"),
        "( ) nested": ("( a ( b ) c )", "( a (b) c )"),
        "( ) one side": ("a ( small) one", "a ( small) one"),
        "[ ]": ("quote [ sic ] here", "quote [sic] here"),
        "[ ] nested": ("[ a [ b ] c ]", "[ a [b] c ]"),
        "$": ("costs $ 5", "costs $5"),
        "£": ("costs £ 5", "costs £5"),
    },
    "lambada": {
        "opening": ("\N{LEFT DOUBLE QUOTATION MARK}no, he said", '\n"no, he said'),
        "closing": ("no\N{RIGHT DOUBLE QUOTATION MARK}, he said", '\nno", he said'),
        "single quotes stay": ("don\N{RIGHT SINGLE QUOTATION MARK}t", "\ndon\N{RIGHT SINGLE QUOTATION MARK}t"),
        "strip": (" \n a  b\nc \t\n", "\na  b\nc"),
        "nothing": ("", "\n"),
    },
    "scientific": {
        "wikitext": ("a well @-@ known [ 1 ] one\n then", "a well-known [1] one\nthen"),
        "lm1b": ("costs £ 5 ; it 'll do .", "costs £5; it'll do."),
        "wikitext comes first": ("see http : / / x.org", "see http:// x.org"),
    },
}


@pytest.mark.parametrize("name", CASES)
def test_cases(name):
    for rule, (text, expected) in CASES[name].items():
        assert detokenize.DETOKENIZERS[name](text) == expected, rule
