"""This library's own prompts for LongBench, for folders without the official ones.

They ask for the same and end alike (code in a newline, numbers in a blank), but scores of other
words are other scores: records hold `wording`.
"""

_QA = (
    "Here is {kind}. Below it stands a question about it; reply with the shortest text that answers"
    " it.\n\n{{context}}\n\nReply to the question with the shortest text that answers it, and"
    " nothing else.{more}\n\nQuestion: {{input}}\nAnswer:"
)
_PASSAGES = _QA.format(kind="a number of passages", more="")
_SUMMARY = (
    "Here {kind}. Your task is a summary of one page.\n\n{{context}}\n\nWrite the summary of one"
    " page.\n\nSummary:"
)
_CODE = "Here is the beginning of a program. Continue it.\n{context}%sThe line that comes next:\n"

WORDING = {
    "narrativeqa": _QA.format(kind="a story, told as a novel or a script", more=""),
    "qasper": _QA.format(
        kind="a paper",
        more=(
            ' Reply "yes" or "no" where that is what is asked, and "unanswerable" where the paper'
            " does not say."
        ),
    ),
    "multifieldqa_en": _QA.format(kind="a text", more=""),
    "multifieldqa_zh": (
        "下面是一篇文章，之后有一个问题。\n\n{context}\n\n请用尽量短的中文回答问题，不要写别的内容。"
        "\n\n问题：{input}\n回答："
    ),
    "hotpotqa": _PASSAGES,
    "2wikimqa": _PASSAGES,
    "musique": _PASSAGES,
    "dureader": (
        "下面是几篇文章，之后有一个问题。\n\n{context}\n\n请根据文章回答问题。\n\n问题：{input}\n回答："
    ),
    "gov_report": _SUMMARY.format(kind="is a report of a government agency"),
    "qmsum": (
        "Here is what was said in a meeting. A request about it follows.\n\n{context}\n\nFulfil the"
        " request in one sentence or a few.\n\nRequest: {input}\nAnswer:"
    ),
    "multi_news": _SUMMARY.format(kind="are articles about one piece of news"),
    "vcsum": "下面是一次会议的记录，请为它写一段摘要。\n\n{context}\n\n摘要：",
    "trec": "Say of what type each question is, as in these examples.\n\n{context}\n{input}",
    "triviaqa": (
        "Each passage is followed by a question, and that by the shortest answer.\n\n{context}\n\n"
        "{input}"
    ),
    "samsum": "Each dialogue is followed by a summary in few words.\n\n{context}\n\n{input}",
    "lsht": "请像下面的例子一样，写出每条新闻的类别。\n\n{context}\n{input}",
    "passage_count": (
        "Here are paragraphs, of which some stand there more than once. How many different ones are"
        " there?\n\n{context}\n\nReply with that number only.\n\nNumber of different paragraphs: "
    ),
    "passage_retrieval_en": (
        "Here are 30 numbered paragraphs, and after them a summary of one of them.\n\n{context}\n\n"
        'Summary: {input}\n\nWhich paragraph is it of? Reply in the form "Paragraph 1".\n\n'
        "The summary is of "
    ),
    "passage_retrieval_zh": (
        "下面是若干编号的段落，之后是其中一段的摘要。\n\n{context}\n\n摘要：{input}\n\n"
        "请写出这段摘要所属的段落，格式为“段落1”。\n\n所属段落："
    ),
    "lcc": _CODE % "",
    "repobench-p": _CODE % "{input}",
}
