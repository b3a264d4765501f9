"""Tables for the results of ``ostinato bench``, within 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

_LONGEST_NAME = 44  # of a kernel; C++ names can be several lines long


def core_tables(results: dict[str, Any]) -> list[RenderableType]:
    stream = [_stream_table(results["stream"])] if "stream" in results else []
    return [_core_table(results), *stream]


def decode_tables(results: dict[str, Any]) -> list[RenderableType]:
    title = f"{results['model']}, {results['dtype']}, {results['mode']}"
    table = new_table(
        title, "batch", "", "per token", "tokens/s", "of\nfloor", "ostinato\nis", "same\ntokens"
    )
    remarks: list[RenderableType] = []
    for row in results["rows"]:
        batch = str(row["batch"])
        if row["floor_ms"] is not None:
            table.add_row(batch, "floor", f"{row['floor_ms']:.3f} ms")
        for name, milliseconds in row["tpot_ms"].items():
            table.add_row(
                batch,
                name,
                f"{milliseconds:.3f} ms{_spread(row['tpot_quartiles_ms'][name])}",
                f"{row['tokens_per_s'][name]:.1f}",
                f"{row['of_floor'][name]:.1%}" if name in row["of_floor"] else "",
                f"{row['speedup_over'][name]:.2f}x" if name in row["speedup_over"] else "",
                _same(row, name),
            )
        for name in row["unusable"]:
            table.add_row(batch, name, "noise", "", "", "", _same(row, name))
        for name in row["failed"]:
            table.add_row(batch, name, "failed")
        remarks += _remarks(row)
    profiles = [_profile_tables(profile) for profile in results.get("profiles", [])]
    return [table, *remarks, _floor_line(results), *(part for parts in profiles for part in parts)]


def _spread(quartiles: Sequence[float]) -> str:
    """Half the interquartile range, relative to its midpoint."""
    low, high = quartiles
    return "" if low == high else f" ±{(high - low) / (high + low):.0%}"


def _same(row: dict[str, Any], name: str) -> str:
    same = row["same_tokens_as"].get(name)
    return "" if same is None else ("yes" if same else "NO")


def _remarks(row: dict[str, Any]) -> list[RenderableType]:
    """Remarks below the table about the cells of a row."""
    batch = row["batch"]
    differ = [
        Text(
            f"{name}, batch {batch}: {count['requests']:,} of {count['of_requests']:,} requests "
            f"have the same tokens; {count['tokens']:,} of {count['of_tokens']:,} tokens precede "
            "a difference"
        )
        for name, count in row["agreement"].items()
        if count is not None and not row["same_tokens_as"][name]
    ]
    noisy = [
        Text(f"{name}, batch {batch}, unusable: {reason}", style="red")
        for name, reason in row["unusable"].items()
    ]
    failed = [
        Text(f"{name}, batch {batch}, failed: {reason}", style="red")
        for name, reason in row["failed"].items()
    ]
    return [*differ, *noisy, *failed]


def _floor_line(results: dict[str, Any]) -> Text:
    weights, bandwidth = results["weight_bytes"], results["bandwidth"]
    if weights is None:
        return Text("no floor: which weights a step reads depends on the tokens (experts)")
    return Text(
        f"floor: {weights / 1e6:,.1f} MB of weights, and the keys and values, at "
        f"{bandwidth['bytes_per_s'] / 1e9:,.1f} GB/s (a plain read: {bandwidth['way']})"
    )


def _profile_tables(profile: dict[str, Any]) -> list[RenderableType]:
    """Where the time of a step goes, and its most expensive kernels."""
    parts = new_table(f"One step at batch {profile['batch']}", "where", "time", "share", "kernels")
    for name, part in profile["parts"].items():
        count = "" if part["count"] is None else f"{part['count']:.1f}"
        share = f"{part['us'] / profile['window_us']:.1%}"
        parts.add_row(name, f"{part['us']:.1f} µs", share, count)
    parts.add_section()
    parts.add_row("together", f"{profile['window_us']:.1f} µs", "100.0%", "")
    for name, key in (("step()", "step_us"), ("gaps", "idle_us"), ("host", "host_us")):
        parts.add_row(f"{name}, not profiled", f"{profile[key]:.1f} µs", "", "")
    kernels = new_table(f"Batch {profile['batch']}: most time", "kernel", "where", "calls", "time")
    for kernel in profile["kernels"][:12]:
        name = kernel["name"]
        shown = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + "..."
        kernels.add_row(
            Text(shown), kernel["part"], f"{kernel['count']:.1f}", f"{kernel['us']:.1f} µs"
        )
    return [parts, kernels, Text(f"trace: {profile['trace']}")]


def capture_tables(results: dict[str, Any]) -> list[RenderableType]:
    title = f"{results['model']}: capture"
    table = new_table(title, "mode", "graphs", "capture", "memory", "until ready", "check")
    for row in results["rows"]:
        table.add_row(
            row["mode"],
            str(row["graphs"]),
            f"{row['capture_s']:.2f} s",
            f"{row['bytes'] / 2**20:.1f} MiB",
            f"{row['ready_s']:.2f} s",
            f"{row['check_ms']:.1f} ms",
        )
    return [table]


def prefill_tables(results: dict[str, Any]) -> list[RenderableType]:
    title = f"{results['model']}: time to first token"
    table = new_table(title, "prompt", "mode", "median", "of eager", "same token")
    for row in results["rows"]:
        for name, milliseconds in row["ttft_ms"].items():
            table.add_row(
                str(row["prompt_len"]),
                name,
                f"{milliseconds:.2f} ms",
                f"{row['fraction_of_eager'][name]:.2f}",
                "yes" if row["same_tokens_as_eager"][name] else "NO",
            )
    return [table]


def lora_tables(results: dict[str, Any]) -> list[RenderableType]:
    title = f"{results['model']}, {results['dtype']}, rank {results['rank']}"
    table = new_table(
        title, "batch", "adapters", "time per\noutput token", "of the time\nwithout LoRA"
    )
    for row in results["rows"]:
        for name, milliseconds in row["tpot_ms"].items():
            share = row["speedup_over"].get(name, 1.0)
            label = "no LoRA" if name == "ostinato" else name
            table.add_row(str(row["batch"]), label, f"{milliseconds:.3f} ms", f"{share:.3f}")
        for name, why in row["unusable"].items():
            table.add_row(str(row["batch"]), name, why, "-")
    return [table]


def offload_tables(results: dict[str, Any]) -> list[RenderableType]:
    title = f"{results['model']}, {results['dtype']}, {results['mode']}"
    columns = ("time per\noutput token", "of the time\nof the copies", "of the time\nwithout")
    table = new_table(title, "batch", "", *columns)
    for row in results["rows"]:
        for name, milliseconds in row["tpot_ms"].items():
            ratio = f"{milliseconds / results['copies_ms']:.3f}"
            label, of_plain = name, ""
            if name == "ostinato":
                label, of_plain = "offload", f"{row['of_plain']:.2f}" if "of_plain" in row else ""
            table.add_row(str(row["batch"]), label, f"{milliseconds:.3f} ms", ratio, of_plain)
        for name, why in row["unusable"].items():
            table.add_row(str(row["batch"]), name, why, "-")
    copies = Text(
        f"The copies of a step alone: {results['host_bytes'] / 2**30:.3f} GiB in "
        f"{results['copies_ms']:.3f} ms, {results['bytes_per_s'] / 1e9:.1f} GB/s; "
        f"{results['slot_bytes'] / 2**30:.3f} GiB of slots on the device"
    )
    return [table, copies]


def sampling_tables(results: dict[str, Any]) -> list[RenderableType]:
    title = f"Sampling from {results['vocab_size']} tokens"
    table = new_table(title, "batch", "parameters", "ours", "torch", "speed-up", "same tokens")
    for row in results["rows"]:
        ours, reference = row["milliseconds"]["ours"], row["milliseconds"]["reference"]
        table.add_row(
            str(row["batch"]),
            row["case"],
            f"{ours:.3f} ms",
            f"{reference:.3f} ms",
            f"{reference / ours:.1f}x",
            f"{row['same_tokens']} of {row['batch']}",
        )
    return [table]


def spec_tables(results: dict[str, Any]) -> list[RenderableType]:
    title = f"{results['model']}, {results['dtype']}, {results['num_tokens']} drafts per request"
    table = new_table(
        title, "batch", "what", "tokens\nper step", "tokens/s", "times\nno drafts", "of ideal"
    )
    for row in results["rows"]:
        for name, cell in row["subjects"].items():
            table.add_row(
                str(row["batch"]),
                name,
                f"{cell['tokens_per_step']:.2f}",
                f"{cell['tokens_per_s']:,.0f}",
                f"{cell['speedup']:.2f}x",
                f"{cell['of_ideal']:.0%}",
            )
    return [table]


def throughput_tables(results: dict[str, Any]) -> list[RenderableType]:
    arrival = "all at once" if results["rate"] is None else f"{results['rate']:g} requests/s"
    title = f"{results['model']}, {results['dtype']}, {results['mode']}, {arrival}"
    rates = new_table(title, "mix", "requests", "seconds", "output\ntokens/s", "all\ntokens/s")
    times = new_table(
        "Milliseconds: p50 / p90 / p99", "mix", "first token", "per output token", "longest\ngap"
    )
    remarks: list[RenderableType] = []
    for row in results["rows"]:
        rates.add_row(
            row["mix"],
            f"{row['num_requests']} ({row['requests_per_s']:.1f}/s)",
            f"{row['duration_s']:.2f}",
            f"{row['output_tokens_per_s']:,.0f}",
            f"{row['tokens_per_s']:,.0f}",
        )
        times.add_row(row["mix"], *latencies(row))
        remarks.append(_how_it_ran(row))
    return [rates, times, *remarks]


def latencies(row: dict[str, Any]) -> tuple[str, str, str]:
    """The percentiles of a row's times to first and per output token, and its longest gap."""
    first = " / ".join(f"{value:.0f}" for value in row["ttft_ms"].values())
    later = " / ".join(_short_ms(value) for value in (row["tpot_ms"] or {}).values())
    gap = row["longest_gap_ms"]
    return first, later, "" if gap is None else f"{gap:.1f}"


def _short_ms(milliseconds: float) -> str:
    return f"{milliseconds:.2f}" if milliseconds < 10 else f"{milliseconds:.1f}"


def _how_it_ran(row: dict[str, Any]) -> Text:
    steps = ", ".join(f"{count:,} {mode}" for mode, count in row["steps"].items())
    reasons = ", ".join(f"{name} {count:,}" for name, count in row["eager_reasons"].items())
    return Text(
        f"{row['mix']}: steps {steps}{f' ({reasons})' if reasons else ''}; "
        f"{row['padding_fraction']:.1%} of replayed tokens were padding; {row['preemptions']:,} "
        f"preemptions; {row['prefix_hit_tokens']:,} of {row['prompt_tokens']:,} prompt tokens "
        "from the prefix cache"
    )


def _core_table(results: dict[str, Any]) -> Table:
    table = new_table("The graph machinery", "what", "measured", "target")
    for keys, microseconds in results["dispatch_us"].items():
        table.add_row(f"dispatch of a batch, {keys} graphs", f"{microseconds:.2f} µs", "≤ 1 µs")
    for device, cost in results["wrapper_us"].items():
        what = f"wrapper over bare replay, 10 tensors, {device}"
        table.add_row(what, f"{cost['own_cost']:.2f} µs", "≤ 3 µs")
    for step in results["cpu_decoder"]:
        what = f"30-layer decoder on the CPU, batch {step['batch']}: replay / eager"
        measured = f"{step['replay_ms']:.1f} / {step['eager_ms']:.1f} ms = {step['ratio']:.2f}"
        table.add_row(what, measured, "< 1")
    return table


def _stream_table(stream: Sequence[dict[str, Any]]) -> Table:
    title = "1,000 random batches of 1 to 64 through a 6-layer transformer, bf16"
    table = new_table(title, "", "total", "first 1,000, warm-up included", "peak memory")
    for row in stream:
        table.add_row(
            row["name"],
            f"{row['total_s'] * 1e3:.0f} ms",
            f"{row['first_1000_s']:.2f} s",
            f"{row['peak_mib']:.0f} MiB",
        )
    return table


def new_table(title: str, *columns: str) -> Table:
    """A table with names left-aligned and numbers right-aligned."""
    table = Table(title=title)
    for column in columns:
        is_name = column in ("", "what", "mix", "mode", "where", "kernel")
        table.add_column(column, justify="left" if is_name else "right")
    return table
