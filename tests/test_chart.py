"""The README's chart shows the figures of the results log."""

from tests.tools.chart import CHART, PAGE, drawn, rates


def test_the_chart_is_that_of_the_page():
    rows = rates(PAGE.read_text())
    assert rows[-1] == ("flatout, 704", 8_476)
    assert CHART.read_text() == drawn(rows)
