"""What ``generate``, ``stream`` and ``chat`` take, and how they refuse the rest: by name."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spelling_models import save_spelling
from tiny_models import save_talking

from ostinato import LLM, GraphConfig, OstinatoError, RequestError, SamplingParams
from ostinato.errors import ConfigError

GREEDY = SamplingParams(temperature=0, max_tokens=3)
IDS = [4, 5, 6]
TEMPLATE = (
    "w7 {% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('no system prompts') }}{% endif %}"
    "{{ message['content'] }} {% endfor %}w9{{ style }}"
)
USER = {"role": "user", "content": "w4 w5"}


def open_llm(path: str) -> LLM:
    return LLM(
        path,
        device="cpu",
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=32,
        kv_cache_memory_bytes="1M",
        show_progress=False,
        graphs=GraphConfig(mode="FULL_DECODE_ONLY", capture_sizes=[1, 4]),
    )


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with open_llm(str(save_talking(tmp_path_factory.mktemp("talking"), TEMPLATE))) as llm:
        yield llm


@pytest.fixture(scope="module")
def answer(llm: LLM) -> list[int]:
    return tokens(llm, [IDS])[0]


def tokens(llm: LLM, prompts: Any) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(prompts, GREEDY)]


def check_unharmed(llm: LLM, answer: list[int]) -> None:
    assert not llm.engine.has_unfinished
    free = llm.engine.scheduler.allocator.num_free_blocks
    assert free == llm.engine.runner.cache.num_blocks - 1
    assert tokens(llm, [IDS]) == [answer]


# --- what is taken --------------------------------------------------------------------------------

ONE_PROMPT: dict[str, Any] = {
    "list": IDS,
    "tuple": tuple(IDS),
    "range": range(4, 7),
    "NumPy": np.array(IDS),
    "NumPy, uint8": np.array(IDS, dtype=np.uint8),
    "NumPy, strided": np.array([4, 0, 5, 0, 6])[::2],
    "tensor": torch.tensor(IDS),
    "tensor, int32": torch.tensor(IDS, dtype=torch.int32),
    "list of NumPy integers": [np.int64(4), np.int32(5), np.uint8(6)],
    "list of tensors of one": list(torch.tensor(IDS)),
    "dict": {"prompt_token_ids": IDS},
    "dict of NumPy": {"prompt_token_ids": np.array(IDS)},
    "text": "w4 w5 w6",
    "dict of text": {"prompt": "w4 w5 w6"},
}


@pytest.mark.parametrize("name", ONE_PROMPT)
def test_all_kinds_of_prompts_are_taken(llm: LLM, answer: list[int], name: str) -> None:
    prompt = ONE_PROMPT[name]
    assert tokens(llm, prompt) == [answer]
    assert tokens(llm, [prompt, IDS, prompt]) == [answer] * 3
    (result,) = llm.generate(prompt, GREEDY)
    assert result.prompt_token_ids == IDS
    assert {type(token) for token in result.prompt_token_ids} == {int}
    streamed = [token for delta in llm.stream(prompt, GREEDY) for token in delta.token_ids]
    assert streamed == answer


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["NumPy", "tensor"])
def test_the_rows_of_an_array_are_prompts(
    llm: LLM, answer: list[int], make: Callable[..., Any]
) -> None:
    alone = [answer, tokens(llm, [[1, 2, 3]])[0]]
    assert tokens(llm, make([IDS, [1, 2, 3]])) == alone
    assert tokens(llm, make([IDS])) == [answer]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_rows_of_a_nested_tensor_are_prompts(llm: LLM, answer: list[int]) -> None:
    alone = [answer, tokens(llm, [[1]])[0]]
    for layout in (torch.strided, torch.jagged):
        assert tokens(llm, torch.nested.nested_tensor([IDS, [1]], layout=layout)) == alone


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_token_ids_on_a_gpu_are_taken(llm: LLM, answer: list[int]) -> None:
    assert tokens(llm, torch.tensor(IDS, device="cuda")) == [answer]


# --- what is refused ------------------------------------------------------------------------------


def short(value: object) -> str:
    """An id that is the same in every process: no addresses."""
    return re.sub(r" at 0x\w+", "", str(value))[:40]


BAD_PROMPTS: list[tuple[Any, str]] = [
    (None, "prompts are text or token ids, one or a list of them, got None"),
    (3, "prompts are text or token ids, one or a list of them, got 3"),
    (b"w4", "got b'w4'; decode bytes first, as in prompt.decode()"),
    ({4, 5}, r"got \{4, 5\}; make a list of it first"),
    ((token for token in IDS), "got <generator.*; make a list of it first"),
    ([], "there are no prompts"),
    ("", "the prompt is empty"),
    ([IDS, ""], r"prompts\[1\] is empty"),
    ([IDS, []], r"prompts\[1\] is empty"),
    ([IDS, None], r"prompts\[1\] is None; a prompt is text or a list of token ids"),
    ([IDS, b"w4"], r"prompts\[1\] is b'w4'.*decode bytes first"),
    (["w4", 5], r"prompts\[1\] is 5; a prompt is text or a list of token ids"),
    ([True, 4], r"prompts\[0\] is True"),
    ([IDS, [True]], r"prompts\[1\] contains True at position 0; token ids are integers"),
    ([IDS, [4, "w5"]], r"prompts\[1\] contains 'w5' at position 1"),
    ([[IDS]], r"the prompt contains \[4, 5, 6\] at position 0"),
    ([4, 2.0], r"prompts\[0\] is 4"),
    ([IDS, [4, 64]], r"prompts\[1\] contains 64; token ids are integers from 0 to 63"),
    ([IDS, np.array([-1])], r"prompts\[1\] contains -1; token ids"),
    ([IDS, [1] * 32], r"prompts\[1\] has 32 tokens, but a sequence has at most 32"),
    ("w4 \ud800", r"the prompt has a lone surrogate, '\\ud800' at character 3"),
    ([IDS, "\udfff"], r"prompts\[1\] has a lone surrogate.*errors='replace'"),
    ({"prompt": "\ud800"}, r"the prompt\['prompt'\] has a lone surrogate"),
    ({"prompt": b"w4"}, r"the prompt\['prompt'\] must be text, got b'w4'; decode bytes"),
    ({"prompt": IDS}, r"the prompt\['prompt'\] must be text, got \[4, 5, 6\]"),
    ({"prompt_token_ids": "w4"}, r"\['prompt_token_ids'\] must be a list of token ids, got 'w4'"),
    ([IDS, {}], r"prompts\[1\] is a dict.*got the keys none"),
    ({"prompt": "w4", 3: 4}, r"one of the keys 'prompt' and .*got the keys 'prompt', 3"),
    (np.array(4), r"a ndarray of shape \(\) and dtype int64; token ids are a 1-D array"),
    (torch.tensor(4), r"a Tensor of shape \(\) and dtype torch.int64; token ids are a 1-D"),
    (np.ones((1, 1, 2), dtype=int), r"shape \(1, 1, 2\)"),
    ([IDS, torch.ones(2, 2, dtype=int)], r"prompts\[1\] is a Tensor of shape \(2, 2\)"),
    (np.array([4.0, 5.0]), r"dtype float64; token ids are integers, in a dense array: convert"),
    (torch.tensor([True]), r"dtype torch.bool; token ids are integers"),
    (torch.tensor([[4.0, 5.0]]), r"dtype torch.float32; token ids are integers"),
    (np.array(["w4"]), r"dtype <U2; token ids are integers"),
    (torch.tensor(IDS).to_sparse(), "token ids are integers, in a dense array"),
    (torch.empty(2, dtype=int, device="meta"), "token ids are integers, in a dense array"),
    ([IDS, torch.nested.nested_tensor([IDS, [4]])], r"prompts\[1\] is a Tensor of several lengths"),
    (np.array([], dtype=int), "the prompt is empty"),
]


@pytest.mark.parametrize(("prompts", "message"), BAD_PROMPTS, ids=short)
def test_bad_prompts_are_refused_by_name(
    llm: LLM, answer: list[int], prompts: Any, message: str
) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(RequestError, match=message):
            call(prompts, GREEDY)
    check_unharmed(llm, answer)


BAD_PARAMS: list[tuple[Any, str]] = [
    ({"temperature": 0}, r"one per prompt, got \{'temperature': 0\}; write SamplingParams"),
    ("greedy", "one per prompt, got 'greedy'"),
    (3, "one per prompt, got 3"),
    ([GREEDY, None], r"params\[1\] is None"),
    ([GREEDY, {}], r"params\[1\] is \{\}"),
    ([GREEDY], "1 SamplingParams for 2 prompts; give one for each, or one for all"),
    ([], "0 SamplingParams for 2 prompts"),
    ([GREEDY] * 3, "3 SamplingParams for 2 prompts"),
]


@pytest.mark.parametrize(("params", "message"), BAD_PARAMS, ids=str)
def test_bad_params_are_refused_by_name(
    llm: LLM, answer: list[int], params: Any, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([IDS, IDS], params)
    with pytest.raises(RequestError, match=message):
        llm.chat([[USER], [USER]], params)
    check_unharmed(llm, answer)


@pytest.mark.parametrize(
    "prompt",
    [
        range(10**12),
        torch.zeros((), dtype=torch.int64).expand(10**12),
        np.broadcast_to(np.int64(1), (10**12,)),
    ],
    ids=["range", "expanded tensor", "broadcast array"],
)
def test_what_takes_memory_only_as_a_list_is_refused_before(llm: LLM, prompt: Any) -> None:
    for prompts in (prompt, [IDS, prompt]):
        with pytest.raises(RequestError, match=r"has 10{12} tokens, but .* at most 32 .*shorten"):
            llm.generate(prompts, GREEDY)


HUGE = 10**5000  # Python does not say it in digits


@pytest.mark.parametrize(
    "refused",
    [
        lambda llm: llm.generate([[HUGE]], GREEDY),
        lambda llm: llm.generate([IDS], SamplingParams(stop_token_ids=[HUGE])),
        lambda llm: llm.generate([IDS], SamplingParams(logit_bias={HUGE: 1.0})),
        lambda llm: SamplingParams(n=HUGE),
        lambda llm: SamplingParams(logprobs=HUGE),
        lambda llm: SamplingParams(seed=HUGE),
        lambda llm: SamplingParams(temperature=HUGE),
    ],
    ids=["prompt", "stop_token_ids", "logit_bias", "n", "logprobs", "seed", "temperature"],
)
def test_integers_that_cannot_be_said_are_refused(
    llm: LLM, refused: Callable[[LLM], object]
) -> None:
    with pytest.raises((RequestError, ConfigError), match="an object of type int"):
        refused(llm)


def test_unknown_arguments_are_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match=r"no option lora_request \(got .* adapter=name"):
        llm.generate([IDS], lora_request=GREEDY)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"generate has no option tools \(got \[\]\): chat\(\)"):
        llm.generate([IDS], tools=[])  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="did you mean sampling_params"):
        llm.stream([IDS], sampling_param=GREEDY)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"LLM\.embed has no option pooling_params"):
        llm.embed([IDS], pooling_params={})  # type: ignore[call-arg]


def test_arguments_that_ask_for_what_happens_are_taken(llm: LLM) -> None:
    same = llm.generate([IDS], GREEDY)[0].outputs[0].token_ids
    theirs: Any = {"lora_request": None, "priority": 0, "use_tqdm": False}
    assert llm.generate([IDS], GREEDY, **theirs)[0].outputs[0].token_ids == same


@pytest.mark.parametrize(
    "name", ["include_stop_str_in_output", "ignore_eos", "skip_special_tokens"]
)
@pytest.mark.parametrize("value", ["no", 0, None])
def test_switches_are_true_or_false(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be True or False, got {value!r}"):
        SamplingParams(**{name: value})


def test_a_stop_string_that_no_model_says_is_refused() -> None:
    with pytest.raises(ConfigError, match="stop must be text without lone surrogates"):
        SamplingParams(stop=["a", "\ud800"])


def test_a_tokenizer_with_more_tokens_than_the_model(tmp_path: Path) -> None:
    file = save_talking(tmp_path, "{{ messages[0].content }}") / "tokenizer.json"
    fields = json.loads(file.read_text())
    fields["model"]["vocab"] |= {"far": 70}
    file.write_text(json.dumps(fields))
    with open_llm(str(tmp_path)) as llm:
        message = (
            r"contains the token 70 \('far'\) at position 2, but the model has 64 tokens, with ids "
            r"from 0 to 63, and its tokenizer has 65; leave that text out, or fetch the tokenizer"
        )
        for prompt in ("w1 w2 far", [1, 2, 70]):
            with pytest.raises(RequestError, match="^the prompt " + message):
                llm.generate(prompt)
        with pytest.raises(RequestError, match="^messages " + message):
            llm.chat([{"role": "user", "content": "w1 w2 far"}])
        for odd in (69, 2**31, 2**70):  # not the tokenizer's either
            with pytest.raises(RequestError, match=f"contains {odd}; token ids are integers from"):
                llm.generate([1, odd])


def test_more_stops_than_min_tokens_can_suppress_are_refused(tmp_path: Path) -> None:
    """Before they start: an error in a step is that of all its requests."""
    path = save_spelling(tmp_path)
    ends = {"eos_token_id": list(range(200, 217))}
    (path / "generation_config.json").write_text(json.dumps(ends))
    stops = list(range(128))
    params = [GREEDY, SamplingParams(stop_token_ids=stops, min_tokens=2)]
    with open_llm(str(path)) as llm:
        with pytest.raises(RequestError, match=r"^prompts\[1\] has min_tokens with 145 stop_token"):
            llm.generate([IDS, IDS], params)
        assert llm.generate(IDS, SamplingParams(stop_token_ids=stops))
        assert llm.generate(IDS, SamplingParams(stop_token_ids=stops[1:], min_tokens=2))


# --- conversations --------------------------------------------------------------------------------


def part(text: Any, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, kind: text}


def test_text_parts_are_lines(llm: LLM) -> None:
    for content in (["w4", "w5"], [part("w4"), part("w5")], ("w4", part("w5"))):
        conversation: Any = [{"role": "user", "content": content}]
        assert llm.render_chat(conversation) == [7, 4, 5, 9]
        (result,) = llm.chat(conversation, GREEDY)
        assert result.prompt_token_ids == [7, 4, 5, 9]
    assert llm.render_chat([{"role": "user", "content": ""}]) == [7, 9]
    assert llm.render_chat([{"role": "user", "content": []}]) == [7, 9]


def test_the_messages_given_are_left_alone(llm: LLM) -> None:
    message: Any = {"role": "user", "content": [part("w4")], "name": "Ada"}
    before = copy.deepcopy(message)
    llm.chat([message], GREEDY)
    assert message == before


def test_several_conversations(llm: LLM) -> None:
    other = {"role": "user", "content": "w6"}
    results = llm.chat([[USER], (USER, other)], GREEDY)
    assert [result.prompt_token_ids for result in results] == [[7, 4, 5, 9], [7, 4, 5, 6, 9]]


def test_variables_of_the_template(llm: LLM) -> None:
    talks: Any = [[USER], [{"role": "user", "content": "w6"}]]
    variables = {"style": " w3"}
    results = llm.chat(talks, GREEDY, chat_template_kwargs=variables)
    expected = [[7, 4, 5, 9, 3], [7, 6, 9, 3]]
    assert [result.prompt_token_ids for result in results] == expected
    assert llm.render_chat(talks[0], chat_template_kwargs=variables) == expected[0]
    alone = llm.generate(expected, GREEDY)
    assert [each.outputs[0].token_ids for each in results] == [
        each.outputs[0].token_ids for each in alone
    ]
    with pytest.raises(RequestError, match=r"has 'stile', .* did you mean style"):
        llm.chat(talks, GREEDY, chat_template_kwargs={"stile": " w3"})


def test_prefixes_are_reused_up_to_what_variables_change(llm: LLM) -> None:
    talk: Any = [{"role": "user", "content": "w11 " * 18}]
    llm.reset_prefix_cache()
    cached = []
    for style in (" w3", " w3", " w4"):
        (result,) = llm.chat(talk, GREEDY, chat_template_kwargs={"style": style})
        cached.append(result.num_cached_tokens)
    assert cached == [0, 16, 16]


def test_an_answer_that_only_calls_tools_needs_no_content(llm: LLM) -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert llm.render_chat([USER, calls]) == [7, 4, 5, 0, 9]  # the template says None


BAD_MESSAGES: list[tuple[Any, str]] = [
    ("hi", "messages must be a list of messages, such as .*got 'hi'; for plain text use generate"),
    (b"hi", "messages must be a list of messages"),
    (None, "messages must be a list of messages, .*got None"),
    (3, "messages must be a list of messages, .*got 3"),
    (USER, "messages must be a list of messages, .*got {'content'"),
    ([], r"the conversation is empty \(messages is \[\]\)"),
    ([[]], r"the conversation is empty \(messages\[0\] is \[\]\)"),
    ([[USER], []], r"the conversation is empty \(messages\[1\] is \[\]\)"),
    (["hi"], r"messages\[0\] must be a message, such as .*, got 'hi'"),
    ([USER, "hi"], r"messages\[1\] must be a message.*got 'hi'"),
    ([USER, None], r"messages\[1\] must be a message.*got None"),
    ([[USER], USER], r"messages\[1\] must be a list of messages"),
    ([[USER], [USER, 3]], r"messages\[1\]\[1\] must be a message.*got 3"),
    ([{"content": "hi"}], r"messages\[0\] has no role; give one that the model knows"),
    ([{"role": 3, "content": "hi"}], r"messages\[0\] has the role 3"),
    ([{"role": "\ud800", "content": "hi"}], r"messages\[0\]\['role'\] has a lone surrogate"),
    ([{"role": "user"}], r"messages\[0\]\['content'\] is missing"),
    ([{"role": "user", "content": None}], r"\['content'\] must be text, .*got None"),
    ([{"role": "user", "content": 3}], r"\['content'\] must be text, .*got 3"),
    ([{"role": "user", "content": b"hi"}], r"\['content'\] must be text, .*got b'hi'"),
    ([{"role": "user", "content": "\udead"}], r"\['content'\] has a lone surrogate"),
    (
        [{"role": "user", "content": [part("w4"), part({"url": "x"}, "image_url")]}],
        r"\['content'\]\[1\] is a part of type 'image_url'; this model takes text only",
    ),
    (
        [{"role": "user", "content": [{"text": "w4"}]}],
        r"\['content'\]\[0\] is a part without a type",
    ),
    ([{"role": "user", "content": [part(3)]}], r"\['content'\]\[0\] must be text"),
    ([{"role": "user", "content": [3]}], r"\['content'\]\[0\] must be text.*got 3"),
    ([{"role": "user", "content": [part("\ud800")]}], r"\['content'\]\[0\] has a lone surrogate"),
    (
        [{"role": "system", "content": "w1"}],
        "chat template cannot render messages: TemplateError: no system prompts; change the",
    ),
    ([[USER], [{"role": "user", "content": "w4 " * 40}]], r"messages\[1\] has 42 tokens, but"),
]


@pytest.mark.parametrize(("messages", "message"), BAD_MESSAGES, ids=short)
def test_bad_messages_are_refused_by_name(
    llm: LLM, answer: list[int], messages: Any, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.chat(messages, GREEDY)
    check_unharmed(llm, answer)


def test_models_that_cannot_talk_say_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    with open_llm(str(save_talking(tmp_path_factory.mktemp("mute"), None))) as llm:
        assert len(tokens(llm, "w4")[0]) == 3
        with pytest.raises(RequestError, match="no chat template, so it cannot take messages"):
            llm.chat([USER], GREEDY)
    with LLM(
        "tiny", random_weights=True, device="cpu", show_progress=False, kv_cache_memory_bytes="4M"
    ) as llm:
        with pytest.raises(RequestError, match="no chat template"):
            llm.chat([USER], GREEDY)
        with pytest.raises(RequestError, match=r"prompts\[1\] is text, and this model has no tok"):
            llm.generate([IDS, "w4"], GREEDY)


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_nothing_that_owns_memory_is_copied(
    llm: LLM, answer: list[int], copied: Callable[[Any], Any]
) -> None:
    stream = llm.stream([IDS], GREEDY)
    with pytest.raises(TypeError, match=r"an LLM cannot be copied.*LLM.from_config\(llm.config\)"):
        copied(llm)
    with pytest.raises(TypeError, match="an engine cannot be copied or pickled"):
        copied(llm.engine)
    with pytest.raises(TypeError, match="a stream cannot be copied or pickled"):
        copied(stream)
    assert [token for delta in stream for token in delta.token_ids] == answer
    assert pickle.loads(pickle.dumps(llm.generate([IDS], GREEDY)))[0].outputs[0].token_ids == answer


# --- junk -----------------------------------------------------------------------------------------

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-2, 70)
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(alphabet=st.characters(exclude_categories=()), max_size=8)
    | st.sampled_from(["w1 w2", "user", "text", "\ud800", "", b"w1", bytearray(b"w1"), ..., int])
    | st.sampled_from([np.int64(3), np.float32(1.5), np.bool_(True), object(), SamplingParams()])
    | st.builds(np.zeros, st.sampled_from([(), 0, 2, (1, 2), (1, 1, 1)]), st.sampled_from("ifU?O"))
    | st.builds(lambda n: torch.ones([2] * n, dtype=torch.int16), st.integers(0, 3))
    | st.sampled_from([torch.ones(2), torch.ones(2, device="meta", dtype=torch.int64)])
)
KEYS = st.sampled_from(["role", "content", "type", "text", "prompt", "prompt_token_ids", 3, None])
JUNK = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.fixed_dictionaries({"role": inner, "content": inner})
        | st.sets(st.integers(0, 5), max_size=2)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@given(prompts=JUNK, params=st.none() | st.just(GREEDY) | JUNK)
@settings(max_examples=400)
def test_junk_is_run_or_refused(llm: LLM, answer: list[int], prompts: Any, params: Any) -> None:
    texts: list[str] = []
    for call in (llm.generate, llm.chat, lambda *given: list(llm.stream(*given))):
        try:
            call(prompts, params)
        except OstinatoError as error:
            texts.append(str(error))
    assert all(len(text) < 400 and "\n" not in text for text in texts)
    check_unharmed(llm, answer)


FIELDS = sorted(SamplingParams.__dataclass_fields__)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(FIELDS), JUNK | st.integers(0, 3), max_size=3))
@settings(max_examples=400)
def test_junk_in_params_is_run_or_refused(
    llm: LLM, answer: list[int], fields: dict[str, Any]
) -> None:
    try:
        params = SamplingParams(**{"max_tokens": 3, **fields})
        if params.n > 8:
            return
        llm.generate([IDS], params)
    except OstinatoError:
        pass
    check_unharmed(llm, answer)
