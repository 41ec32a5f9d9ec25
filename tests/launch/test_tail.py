from hvd_autosync.launch.tail import Tail


def tail_of(*lines: str) -> Tail:
    tail = Tail(8)
    for line in lines:
        tail.add(line.encode() + b"\n")
    return tail


def test_lines_are_separated_by_rank_and_keep_their_order() -> None:
    tail = tail_of(
        "[1]<stderr>:one",
        "launching",
        "[0]<stdout>:two",
        "[1,1]<stderr>: three",
        "Sat Nov 21 11:00:00 2026[0]<stderr>:four",
    )
    assert tail.ranks() == [0, 1]
    assert tail.of([1]) == "one\nthree"
    assert tail.of([1, 0]) == "one\ntwo\nthree\nfour"
    assert tail.launcher() == "launching"
    assert tail.whole() == "one\nlaunching\ntwo\nthree\nfour"


def test_the_lines_of_a_rank_stay_when_others_write_a_thousand_lines() -> None:
    tail = tail_of("[7]<stderr>:RuntimeError: no memory", *["[0]<stderr>:and so on"] * 1000)
    assert tail.of([7]) == "RuntimeError: no memory"
    assert tail.of([0]).count("\n") < 100


def test_lines_without_text_are_dropped_and_long_ones_cut() -> None:
    tail = tail_of("[0]<stderr>:", "[1,0]<stderr>: ", "   ", "[0]<stdout>:" + "x" * 9999)
    assert set(tail.whole()) == {"x"}
    assert len(tail.whole()) < 1000


def test_indentation_stays() -> None:
    for prefix in ("[0]<stderr>:", "[1,0]<stderr>: "):  # MPI puts a space between
        assert tail_of(f'{prefix}  File "train.py"').whole() == '  File "train.py"'


def test_bytes_that_are_no_text_are_replaced() -> None:
    tail = Tail(8)
    tail.add(b"[0]<stderr>:\xff\n")
    assert tail.of([0]) == "\N{REPLACEMENT CHARACTER}"
