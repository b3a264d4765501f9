"""OpenAI's own client gets from the server what ``LLM`` gives offline."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from serving_models import listening
from tiny_encoders import save_encoder
from tiny_vision import save_vision_model

from ostinato import LLM, AsyncLLM, CompletionOutput, SamplingParams
from ostinato.serving.http.app import create_app
from ostinato.serving.http.server_config import ServerConfig

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
SEEDED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "max_tokens": 12, "n": 2}
TALK: Any = [{"role": "user", "content": "w4 w5"}]
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWj"
    "R9awAAAABJRU5ErkJggg=="
)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def texts(outputs: list[CompletionOutput]) -> list[tuple[str, str | None]]:
    return [(each.text, each.finish_reason) for each in outputs]


@pytest.mark.parametrize("options", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("model", ["tiny", "poet"])
def test_completions(llm: LLM, client: OpenAI, options: dict[str, Any], model: str) -> None:
    adapter = None if model == "tiny" else model
    prompts = ["w1 w2 w3", "w9"]
    wanted = llm.generate(prompts, SamplingParams(**options), adapter=adapter)
    answer = client.completions.create(model=model, prompt=prompts, **options)
    flat = [each for output in wanted for each in output.outputs]
    assert [(c.text, c.finish_reason) for c in answer.choices] == texts(flat)
    assert [choice.index for choice in answer.choices] == list(range(len(flat)))
    assert answer.object == "text_completion"
    assert answer.model == model
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4
    assert answer.usage.completion_tokens == sum(len(each.token_ids) for each in flat)
    streamed = client.completions.create(model=model, prompt=prompts, stream=True, **options)
    joined = [["", None] for _ in flat]
    for chunk in streamed:
        (choice,) = chunk.choices
        joined[choice.index][0] += choice.text
        joined[choice.index][1] = choice.finish_reason
    assert [tuple(each) for each in joined] == texts(flat)


@pytest.mark.slow
def test_token_prompts(llm: LLM, client: OpenAI) -> None:
    (wanted,) = llm.generate([[5, 6, 7]], SamplingParams(**GREEDY))
    for prompt in ([5, 6, 7], [[5, 6, 7]]):
        answer = client.completions.create(model="tiny", prompt=prompt, **GREEDY)
        assert answer.choices[0].text == wanted.outputs[0].text


@pytest.mark.parametrize("options", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_chats(llm: LLM, client: OpenAI, options: dict[str, Any]) -> None:
    (wanted,) = llm.chat(TALK, SamplingParams(**options))
    answer = client.chat.completions.create(model="tiny", messages=TALK, **options)
    got = [(choice.message.content, choice.finish_reason) for choice in answer.choices]
    assert got == texts(wanted.outputs)
    assert {choice.message.role for choice in answer.choices} == {"assistant"}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(wanted.prompt_token_ids)
    stream = client.chat.completions.create(
        model="tiny",
        messages=TALK,
        stream=True,
        stream_options={"include_usage": True},
        **options,
    )
    *chunks, last = list(stream)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == sum(len(each.token_ids) for each in wanted.outputs)
    assert all(chunk.usage is None for chunk in chunks)
    joined: list[list[Any]] = [["", None] for _ in wanted.outputs]
    for chunk in chunks:
        (choice,) = chunk.choices
        joined[choice.index][0] += choice.delta.content or ""
        joined[choice.index][1] = choice.finish_reason
    assert [tuple(each) for each in joined] == texts(wanted.outputs)
    roles = [chunk.choices[0].delta.role for chunk in chunks]
    assert roles[: len(wanted.outputs)] == ["assistant"] * len(wanted.outputs)


def test_log_probabilities(llm: LLM, client: OpenAI) -> None:
    params = SamplingParams(**GREEDY, logprobs=3)
    (wanted,) = llm.generate(["w1 w2"], params)
    rows = wanted.outputs[0].logprobs
    assert rows is not None
    answer = client.completions.create(model="tiny", prompt="w1 w2", logprobs=3, **GREEDY)
    got = answer.choices[0].logprobs
    assert got is not None
    chosen = [row[token] for token, row in zip(wanted.outputs[0].token_ids, rows, strict=True)]
    assert got.tokens == [each.decoded_token for each in chosen]
    assert got.token_logprobs == [each.logprob for each in chosen]
    assert got.top_logprobs == [
        {each.decoded_token: each.logprob for each in row.values()} for row in rows
    ]
    (talked,) = llm.chat(TALK, params)
    chat = client.chat.completions.create(
        model="tiny", messages=TALK, logprobs=True, top_logprobs=3, **GREEDY
    )
    content = chat.choices[0].logprobs
    assert content is not None
    assert content.content is not None
    assert talked.outputs[0].logprobs is not None
    for ours, token_id, row in zip(
        content.content, talked.outputs[0].token_ids, talked.outputs[0].logprobs, strict=True
    ):
        assert (ours.token, ours.logprob) == (f"w{token_id}", row[token_id].logprob)
        assert bytes(ours.bytes or ()) == ours.token.encode()
        assert [top.token for top in ours.top_logprobs] == [
            each.decoded_token for each in sorted(row.values(), key=lambda v: -v.logprob)[:3]
        ]


def test_stops_and_vllm_s_parameters(llm: LLM, client: OpenAI) -> None:
    whole = llm.generate(["w1 w2"], SamplingParams(**GREEDY))[0].outputs[0]
    word = whole.text.split()[4]
    params = SamplingParams(**GREEDY, stop=[word], include_stop_str_in_output=True, min_tokens=2)
    (wanted,) = llm.generate(["w1 w2"], params)
    more = {"include_stop_str_in_output": True, "min_tokens": 2}
    answer = client.completions.create(
        model="tiny", prompt="w1 w2", stop=[word], extra_body=more, **GREEDY
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == wanted.outputs[0].text
    assert answer.choices[0].text.endswith(word)


@pytest.mark.slow
def test_thirty_two_streams_at_once(llm: LLM, url: str) -> None:
    prompts = [[1 + (7 * k + j) % 60 for j in range(1 + k % 9)] for k in range(32)]
    options = [{"temperature": k % 2, "seed": k, "max_tokens": 5 + k % 11} for k in range(32)]
    params = [SamplingParams(**each) for each in options]
    wanted = [each.outputs[0].text for each in llm.generate(prompts, params)]

    async def one(client: AsyncOpenAI, prompt: list[int], options: Any) -> str:
        stream = await client.completions.create(
            model="tiny", prompt=prompt, stream=True, **options
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            tasks = (one(client, *each) for each in zip(prompts, options, strict=True))
            return await asyncio.gather(*tasks)

    assert asyncio.run(all_of_them()) == wanted


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "poet"]
    assert client.models.retrieve("poet").owned_by == "ostinato"
    with pytest.raises(openai.NotFoundError, match="model 'other' is not served here") as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_errors_are_openai_s(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="model 'gpt-4' is not served here") as caught:
        client.completions.create(model="gpt-4", prompt="w1")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError, match="temperature must be a number") as bad:
        client.completions.create(model="tiny", prompt="w1", temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="has 200 tokens"):
        client.completions.create(model="tiny", prompt=[1] * 200, stream=True)
    with pytest.raises(openai.BadRequestError, match="none of the known formats of tool calls"):
        client.chat.completions.create(
            model="tiny", messages=TALK, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    with pytest.raises(openai.BadRequestError, match="this model was loaded to generate"):
        client.embeddings.create(model="tiny", input="w1")


@pytest.mark.slow
def test_embeddings(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("encoder")
    save_encoder(path, tokenizer=True)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "show_progress": False}
    with (
        LLM(path, task="embed", **options) as llm,
        AsyncLLM(path, task="embed", **options) as engine,
        listening(create_app(engine, ServerConfig(served_model_name="bert"))) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        texts = ["w1 w2", "w3"]
        wanted = [each.embedding.tolist() for each in llm.embed(texts, dimensions=16)]
        for form in ("float", "base64", None):
            chosen: Any = {} if form is None else {"encoding_format": form}
            answer = client.embeddings.create(model="bert", input=texts, dimensions=16, **chosen)
            if form != "base64":  # which the client leaves to us if we ask for it
                assert [each.embedding for each in answer.data] == wanted
        assert answer.usage.total_tokens > 0
        with pytest.raises(openai.BadRequestError, match="dimensions must be an integer"):
            client.embeddings.create(model="bert", input="w1", dimensions=1000)
        long = "w1 " * 100
        with pytest.raises(openai.BadRequestError, match="or pass truncate=True"):
            client.embeddings.create(model="bert", input=long)
        # The error's advice holds here, too.
        cut = client.embeddings.create(model="bert", input=long, extra_body={"truncate": True})
        assert cut.data[0].embedding == llm.embed(long, truncate=True)[0].embedding.tolist()
        with pytest.raises(openai.BadRequestError, match="loaded to embed, not to generate"):
            client.completions.create(model="bert", prompt="w1")


@pytest.mark.slow
def test_images(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("vision")
    save_vision_model(path, "qwen3_vl")
    options: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "show_progress": False,
        "max_model_len": 128,
        "kv_cache_memory_bytes": "4M",
        "enforce_eager": True,
    }
    picture = {"type": "image_url", "image_url": {"url": PIXEL}}
    talk: Any = [{"role": "user", "content": [picture, {"type": "text", "text": "what is this"}]}]
    with LLM(path, **options) as llm:
        wanted = llm.chat(talk, SamplingParams(**GREEDY))[0].outputs[0].text
    with (
        AsyncLLM(path, **options) as engine,
        listening(create_app(engine, ServerConfig(served_model_name="eyes"))) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = client.chat.completions.create(model="eyes", messages=talk, **GREEDY)
        assert answer.choices[0].message.content == wanted
        for place in ("/etc/hostname", "file:///etc/hostname", "http://127.0.0.1:1/x.png"):
            talk[0]["content"][0] = {"type": "image_url", "image_url": {"url": place}}
            with pytest.raises(openai.BadRequestError, match="only data URLs are read"):
                client.chat.completions.create(model="eyes", messages=talk, **GREEDY)
