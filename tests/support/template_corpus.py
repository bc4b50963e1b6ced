"""Chat templates of current model families, reduced to their mechanisms, and what each target has to write.

`templates/NAME.jinja` is a fixture of our own. The texts expected here are written by hand, one per assistant
turn: what a target of that family writes behind its generation prompt, up to the token that ends its turn.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from dflash_core.data.formats import REASONING_FIELDS
from tests.support.chat_families import small_tokenizer

DIRECTORY = Path(__file__).parent / "templates"
KINDS = ("single", "multi", "system", "tools", "reasoning", "empty")
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
HERMES_CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'

Texts = list[str]
Row = tuple[list[dict[str, Any]], Any]


@dataclass(frozen=True)
class Family:
    """One template: `end` closes its turns; `controls` and `added` are its other added tokens."""

    name: str
    end: str
    controls: str = ""
    # Added tokens that are not special.
    added: str = ""
    # Written before each answer.
    before: str = ""
    # Written for a call of f; "": the template renders no calls.
    call: str = ""
    # Written with the reasoning {} before an answer, in the last turn or in all; "": none is rendered.
    reasoning: str = ""
    keeps_reasoning: bool = False
    # Whether the template renders a system turn.
    system: bool = True
    # What the last turn ends with, where that differs; also what a text that is shown later lacks.
    last_end: str | None = None
    # Tokens that swallow the white space behind them.
    rstrip: str = ""
    # The tokenizer's, where it is not the end of turn.
    eos: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    # The template prints only contents that are lists of parts.
    parts: bool = False

    @property
    def template(self) -> str:
        return (DIRECTORY / f"{self.name}.jinja").read_text(encoding="utf-8").removesuffix("\n")

    def row(self, kind: str) -> Row | None:
        """Return messages and tools; None for a kind that the template does not render."""
        names = [name for name in REASONING_FIELDS if name in self.template]
        if (kind == "system" and not self.system) or (kind == "tools" and not self.call):
            return None
        if kind in ("reasoning", "empty") and not (names and self.reasoning):
            return None
        turns = [{"role": "user", "content": "q1"}, {"role": "assistant", "content": "a1"}]
        if kind == "system":
            turns.insert(0, {"role": "system", "content": "s"})
        if kind == "tools":
            call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
            return [turns[0], call, {"role": "tool", "content": "r"}, turns[1]], TOOLS
        if kind in ("multi", "reasoning", "empty"):
            turns += [{"role": "user", "content": "q2"}, {"role": "assistant", "content": "a2"}]
        if kind in ("reasoning", "empty"):
            for number, turn in enumerate(turns):
                if turn["role"] == "assistant":
                    thought = f"r{number // 2 + 1}" if kind == "reasoning" else "\n"
                    turn.update(dict.fromkeys(names, thought))
        return turns, None

    def written(self, kind: str) -> Texts:
        """Return what the target has to write at each turn that the whole shows."""
        last = self.end if self.last_end is None else self.last_end
        if kind == "tools":
            return [self.call, f"{self.before}a1{last}"]
        if kind == "reasoning":
            texts = [self.reasoning.format("r2") + "a2" + last]
            first = [self.reasoning.format("r1") + "a1" + self.end]
            return first + texts if self.keeps_reasoning else texts
        if kind in ("multi", "empty"):
            return [f"{self.before}a1{self.end}", f"{self.before}a2{last}"]
        return [f"{self.before}a1{last}"]

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The small tokenizer with the family's tokens."""
        inner = Tokenizer.from_str(small_tokenizer().backend_tokenizer.to_str())
        swallowing = self.rstrip.split()
        special = [*self.controls.split(), "<s>", "</s>"]
        if self.end not in self.added.split() and self.end.count("<") < 2:
            special += self.end.split()
        inner.add_special_tokens(
            [
                AddedToken(text, special=True, normalized=False, rstrip=text in swallowing)
                for text in dict.fromkeys([*swallowing, *special])
            ]
        )
        inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in self.added.split()])
        eos = self.eos or self.end.strip()
        wrapped = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token=eos)
        wrapped.chat_template = self.template
        return wrapped


CHATML = "<|im_start|>"
THINK_TAGS = "<think> </think>"
CALL_TAGS = "<tool_call> </tool_call>"
QWEN = {"end": "<|im_end|>", "controls": CHATML, "call": HERMES_CALL + "<|im_end|>"}
QWEN_THINKS = {**QWEN, "added": f"{THINK_TAGS} {CALL_TAGS}"}
CHANNEL = "<|channel|>final<|message|>"
DEEPSEEK = {"end": "<｜end▁of▁sentence｜>", "controls": "<｜User｜> <｜Assistant｜>"}
GEMMA = {"end": "<end_of_turn>", "controls": "<start_of_turn>"}
GLM = {
    "end": "<|user|>",
    "last_end": "",
    "controls": "[gMASK] <sop> <|system|> <|assistant|> <|observation|>",
}
MISTRAL = {"end": "</s>", "controls": "[INST] [/INST] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [THINK] [/THINK]"}
FAMILIES = [
    Family("qwen2", **QWEN),
    Family("qwen3", **QWEN_THINKS, reasoning="<think>\n{}\n</think>\n\n"),
    Family("qwen3-thinking-2507", **QWEN_THINKS, reasoning="{}\n</think>\n\n"),
    Family("qwq", **QWEN_THINKS),
    Family(
        "qwen3-coder",
        "<|im_end|>",
        CHATML,
        call="\n<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call><|im_end|>",
    ),
    Family("smollm3", "<|im_end|>", CHATML, THINK_TAGS),
    Family("yi", **QWEN),
    Family("internlm2", **QWEN),
    Family("lfm2", **QWEN),
    Family("olmo2", "<|endoftext|>", "<|user|> <|assistant|> <|system|>"),
    Family("olmo3-think", **QWEN_THINKS),
    Family("nemotron-nano2", "\n<SPECIAL_12>", "<SPECIAL_10> <SPECIAL_11>", THINK_TAGS),
    Family("llama2", " </s>", before=" "),
    Family("llama3", "<|eot_id|>", "<|start_header_id|> <|end_header_id|>"),
    Family(
        "llama31",
        "<|eot_id|>",
        "<|start_header_id|> <|end_header_id|> <|eom_id|> <|python_tag|>",
        call='<|python_tag|>{"name": "f", "arguments": {"x": 1}}<|eom_id|>',
    ),
    Family("mistral-v1", **MISTRAL, system=False),
    Family(
        "mistral-nemo",
        "</s>",
        "[INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
        call='[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]</s>',
    ),
    Family("mistral-small3", **MISTRAL),
    Family("magistral", **MISTRAL, reasoning="[THINK]{}[/THINK]", keeps_reasoning=True),
    Family("deepseek-v3", **DEEPSEEK),
    Family("deepseek-r1", **DEEPSEEK, added=THINK_TAGS),
    Family(
        "deepseek-v31",
        **DEEPSEEK,
        added=THINK_TAGS,
        call='<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜><｜end▁of▁sentence｜>',
    ),
    Family("gemma2", **GEMMA, system=False),
    Family("gemma3", **GEMMA),
    Family("gemma4", "<turn|>", "<|turn> <|channel> <channel|>", reasoning="<|channel>thought\n{}<channel|>"),
    Family("phi3", "<|end|>", eos="<|endoftext|>", rstrip="<|user|> <|assistant|> <|system|> <|end|>"),
    Family("phi4", "<|im_end|>", "<|im_start|> <|im_sep|>"),
    Family(
        "phi4-mini", "<|end|>", "<|user|> <|assistant|> <|system|> <|tool|> <|/tool|>", eos="<|endoftext|>"
    ),
    Family(
        "granite3",
        "<|end_of_text|>",
        "<|start_of_role|> <|end_of_role|> <|tool_call|>",
        call='<|tool_call|>{"name": "f", "arguments": {"x": 1}}<|end_of_text|>',
    ),
    Family(
        "command-r",
        "<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|>",
    ),
    Family(
        "command-a-reasoning",
        "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|> <|START_THINKING|> "
        "<|END_THINKING|> <|START_RESPONSE|> <|END_RESPONSE|> <|END_OF_TURN_TOKEN|>",
        eos="<|END_OF_TURN_TOKEN|>",
        before="<|START_RESPONSE|>",
        reasoning="<|START_THINKING|>{}<|END_THINKING|><|START_RESPONSE|>",
        keeps_reasoning=True,
    ),
    Family("glm4", **GLM, before="\n", call='f\n{"x": 1}<|observation|>'),
    Family(
        "glm45",
        **GLM,
        added=f"{THINK_TAGS} {CALL_TAGS}",
        before="\n",
        call="\n<tool_call>f</tool_call><|observation|>",
        reasoning="\n<think>{}</think>\n",
    ),
    Family(
        "gpt-oss",
        "",
        "<|start|> <|channel|> <|message|> <|end|> <|call|> <|return|>",
        before=CHANNEL,
        last_end="<|return|>",
        call=' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>',
        reasoning="<|channel|>analysis<|message|>{}<|end|><|start|>assistant" + CHANNEL,
    ),
    Family(
        "kimi-k2",
        "<|im_end|>",
        "<|im_system|> <|im_user|> <|im_assistant|> <|im_middle|> <|tool_calls_section_begin|> "
        "<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>",
        call='<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>{"x": 1}'
        "<|tool_call_end|><|tool_calls_section_end|><|im_end|>",
    ),
    Family(
        "kimi-vl-thinking",
        "<|im_end|>",
        "<|im_system|> <|im_user|> <|im_assistant|> <|im_middle|>",
        "\u25c1think\u25b7 \u25c1/think\u25b7",
    ),
    Family(
        "minimax-m2",
        "[e~[",
        "]~!b[ ]~b]",
        THINK_TAGS,
        call='\n<minimax:tool_call>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>[e~[',
        reasoning="{}\n</think>\n\n",
    ),
    Family("exaone35", "[|endofturn|]", "[|system|] [|user|] [|assistant|]"),
    Family(
        "exaone4",
        "[|endofturn|]",
        "[|system|] [|user|] [|assistant|]",
        THINK_TAGS,
        reasoning="<think>\n{}\n</think>\n\n",
    ),
    Family(
        "hunyuan",
        "\n</answer><|eos|>",
        "<|startoftext|> <|extra_0|> <|extra_4|> <|eos|>",
        f"{THINK_TAGS} <answer> </answer>",
        eos="<|eos|>",
        before="<answer>\n",
        reasoning="<think>\n{}\n</think>\n<answer>\n",
    ),
    Family(
        "seed-oss",
        "<seed:eos>",
        "<seed:bos>",
        "<seed:think> </seed:think>",
        reasoning="<seed:think>{}</seed:think>",
        keeps_reasoning=True,
    ),
    Family("ernie45", "<|end_of_sentence|>", "<|begin_of_sentence|>"),
    Family("falcon3", "<|endoftext|>", added="<|user|> <|assistant|> <|system|>"),
    Family(
        "apertus",
        "<|assistant_end|>",
        "<|assistant_start|> <|user_start|> <|user_end|> <|inner_prefix|> <|inner_suffix|>",
        reasoning="<|inner_prefix|>{}<|inner_suffix|>",
        keeps_reasoning=True,
    ),
    Family("jamba", "<|eom|>", "<|bom|> <|user|> <|assistant|> <|system|>"),
    Family("baichuan2", "<reserved_106>", "<reserved_107>", last_end=""),
    Family("vicuna", "</s>"),
    Family("zephyr", "</s>"),
    Family(
        "solar-open",
        "<|end|>",
        "<|begin|> <|think|> <|content|>",
        before="<|content|>",
        reasoning="<|think|>{}<|end|><|begin|>assistant<|content|>",
    ),
    # The end of its turns is an added token that is not special.
    Family("ling", "<|role_end|>", added="<role> </role> <|role_end|>", eos="</s>"),
    Family(
        "dots1",
        "<|endofresponse|>",
        "<|userprompt|> <|endofuserprompt|> <|response|> <|system|> <|endofsystem|>",
    ),
    Family(
        "longcat",
        "</longcat_s>",
        added="<longcat_think> </longcat_think>",
        reasoning="<longcat_think>\n{}\n</longcat_think>\n",
        keeps_reasoning=True,
    ),
    Family("xverse", "<|endoftext|>"),
    Family("smolvlm", "<end_of_utterance>", CHATML, before=" ", parts=True),
    Family(
        "kimi-k3",
        "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>",
        "<|open|> <|close|> <|sep|> <|end_of_msg|>",
        eos="<|end_of_msg|>",
        before="<|open|>response<|sep|>",
        reasoning="{}<|close|>think<|sep|><|open|>response<|sep|>",
        keeps_reasoning=True,
    ),
    Family(
        "hunyuan3",
        "<｜hy_eos｜>",
        "<｜hy_User｜> <｜hy_Assistant｜>",
        "<think:open> </think:open>",
        last_end="",
        reasoning="<think:open>{}</think:open>",
    ),
    Family(
        "apriel",
        "\n<|end|>",
        "<|begin_user|> <|begin_system|> <|begin_assistant|> <|end|>",
        last_end="",
        reasoning="{}\n[BEGIN FINAL RESPONSE]\n",
    ),
    Family(
        "glm47",
        **GLM,
        added=f"{THINK_TAGS} {CALL_TAGS}",
        call="<tool_call>f</tool_call><|observation|>",
        reasoning="{}</think>",
    ),
    Family(
        "qwen35",
        "<|im_end|>",
        CHATML,
        THINK_TAGS,
        call="<tool_call>\n<function=f>\n</function>\n</tool_call><|im_end|>",
        reasoning="{}\n</think>\n\n",
    ),
    Family("deepseek-r1-marked", **DEEPSEEK, added=THINK_TAGS),
    Family("phi3-marked", "<|end|>", "<|user|> <|assistant|> <|system|>", eos="<|endoftext|>"),
    Family(
        "llama4",
        "<|eot|>",
        "<|header_start|> <|header_end|> <|eom|> <|python_start|> <|python_end|>",
        call='<|python_start|><|python_end|>{"name": "f"}<|eom|>',
    ),
]
