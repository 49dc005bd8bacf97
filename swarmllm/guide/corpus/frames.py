"""The sentences around a term or a follow-up. The held-out ones are never seen in training."""

# One question, one answer and one list per line reads better here than any wrapping.
# fmt: off
# ruff: noqa: E501
from __future__ import annotations

DEFINITIONS = (
    "what is {a}?", "what's {a}?", "what is {a} in swarmllm?", "explain {a}", "explain {a} to me", "define {t}", "define {a}", "what does {t} mean?", "what does the word {t} mean here?", "can you explain {a}?",
    "could you tell me what {a} is?", "tell me about {a}", "tell me what {a} is", "i don't understand what {a} is", "what do you mean by {t}?", "what is meant by {t}?", "meaning of {t}", "{t}?", "{t}", "what exactly is {a}?",
    "how would you describe {a}?", "describe {a}", "give me a definition of {t}", "do you know what {a} is?", "i would like to know what {a} is", "help me understand {a}", "so what is {a}?", "what is the meaning of {t} in this project?",
    "in swarmllm, what is {a}?", "and {a}, what is that?", "what is this {t} thing?", "what should i know about {a}?", "i keep reading about {a}, what is it?", "the docs mention {a}. what is that?", "{t} definition", "{t} meaning",
    "{t} explained", "what's the idea of {a}?", "what is the purpose of {a}?", "what is {a} for?", "what role does {a} play?", "what does {a} do?", "wat is {a}", "whats {a}", "what are we talking about when we say {t}?", "please define {a}",
    "please explain what {a} is", "can you tell me more about {a}?", "could you explain the term {t}?", "i want to understand {a}", "what does {t} refer to?", "what kind of thing is {a}?", "would you explain {a}?", "how do you define {t}?",
    "can you say what {a} is?", "what do people call {t}?", "i am looking for an explanation of {a}", "what does swarmllm mean by {t}?", "is {t} something in swarmllm?", "never heard of {t}. what is it?",
)
HELDOUT_DEFINITIONS = (
    "please clarify the term {t}", "could you describe what {a} is?", "i want to learn about {a}", "what is {a}, exactly?", "teach me about {a}", "can you define {t} for me?", "let's talk about {a}. what is it?", "new here: what is {a}?",
    "what do i have to imagine under {t}?", "please tell me something about {a}", "someone mentioned {a}. what does it mean?", "how can i understand {a}?",
)

SHORTS = (
    "briefly, what is {a}?", "what is {a} in one sentence?", "{t} in a few words", "short answer: what is {a}?", "tl;dr {t}", "one line about {a} please", "explain {a} in one sentence", "explain {a} briefly", "{t} in short",
    "what is {a}? keep it short", "what is {a}? one sentence please", "a short definition of {t}", "describe {a} in a few words", "what is {a}? be brief", "in a nutshell, what is {a}?", "quickly, what is {a}?",
)
HELDOUT_SHORTS = ("give me a one-sentence explanation of {a}", "in brief: what is {a}?", "shortly, what is {a}?")

SHORT_WRAPPERS = ("briefly: {q}", "in one sentence: {q}", "{q} keep it short", "{q} be brief", "short answer: {q}", "{q} one sentence please", "in a few words: {q}", "tl;dr: {q}", "{q} in short")
HELDOUT_SHORT_WRAPPERS = ("short answer please: {q}", "{q} answer briefly")

FOLLOW_UPS: dict[str, tuple[str, ...]] = {
    "why": ("why?", "why is that?", "why is that so?", "how come?", "what is the reason?", "and why?", "what is the reason for that?", "but why?", "why so?", "for what reason?", "can you tell me why?", "why is it like that?", "why do you do that?", "what is that good for?", "why is it done this way?"),
    "more": ("tell me more", "go on", "more details please", "can you say more?", "elaborate", "more", "more please", "what else?", "tell me more about it", "can you elaborate?", "anything else?", "give me more details", "i want to know more", "say more about that", "continue"),
    "command": ("give me the command", "what is the command?", "which command do i type?", "show me the command", "what do i type?", "just the command please", "command?", "what's the command for that?", "how do i do that?", "the command please", "and the command?", "which command is it?", "how do i do this?"),
    "port": ("and what port does it use?", "which port?", "what port?", "which port does it use?", "on which port?", "and the port?", "what port is that?", "what is its port?", "on what port does it listen?", "and on which port is that?"),
    "again": ("say that again", "repeat that please", "again please", "pardon?", "can you repeat that?", "repeat", "once more", "what did you say?", "i did not get that, again please", "come again?", "could you say that again?", "repeat your answer", "please repeat"),
    "shorter": ("shorter please", "make it shorter", "in one sentence?", "too long", "can you summarise that?", "shorter", "in short?", "summarise that", "that is too long", "can you say that in fewer words?", "the short version please", "tl;dr", "more briefly please", "briefly?", "sum it up"),
    "asked": ("what did i just ask?", "what was my question?", "what did i ask you?", "what did i ask?", "do you remember my question?", "repeat my question", "what was i asking about?", "what did i want to know?", "what have i just asked you?", "what was my last question?"),
    "ellipsis": ("and {a}?", "what about {a}?", "how about {a}?", "and what about {a}?", "and what is {a}?", "{a}?", "ok, and {a}?", "now {a}", "and {t}?", "what about {t}?", "then what is {a}?", "the same for {a}"),
    "name?": ("what is my name?", "what's my name?", "do you know my name?", "who am i?", "do you remember my name?", "how am i called?", "tell me my name", "what did i say my name was?", "can you remember my name?", "my name?", "what was my name again?"),
    "name": ("my name is {n}", "i am {n}", "call me {n}", "i'm {n}", "hi, i am {n}", "hello, my name is {n}", "hi, my name is {n}", "you can call me {n}", "my name is {n}.", "hello, i'm {n}", "by the way, my name is {n}", "i am called {n}", "please call me {n}"),
}
HELDOUT_FOLLOW_UPS: dict[str, tuple[str, ...]] = {
    "why": ("and why is that?", "tell me why", "what's the reason for this?"),
    "more": ("please tell me more", "could you give more details?", "say more"),
    "command": ("please give me the command", "what command is that?", "can you show me the command?"),
    "port": ("and which port does it use?", "what port does it listen on?"),
    "again": ("please say that again", "can you say it again?", "repeat that"),
    "shorter": ("can you make it shorter?", "a shorter version please", "please summarise"),
    "asked": ("what did i just ask you?", "which question did i ask?", "can you repeat my question?"),
    "ellipsis": ("ok and what about {a}?", "so what about {a}?", "and then {a}?"),
    "name?": ("do you still know my name?", "and what is my name?", "please tell me my name"),
    "name": ("hey, my name is {n}", "good morning, i am {n}", "just call me {n}"),
}

UNKNOWN: dict[str, str] = {
    "why": "I do not know more about that.",
    "more": "I do not know more about that.",
    "command": "I know no command for that.",
    "port": "I know no port for that.",
}
"""What the guide says when a topic has nothing for a follow-up."""

SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are the guide of SwarmLLM.", "You are the guide, a small model that knows SwarmLLM.", "You answer questions about SwarmLLM.", "Be helpful and polite.", "You are a friendly assistant.",
    "You are an AI assistant.", "Answer the question of the user.", "You are a helpful AI assistant that answers questions.", "Help the user with SwarmLLM.",
    "You are [a|the] [helpful|friendly|polite|good|careful|smart|honest] [assistant|guide|bot|helper|chatbot|expert].[| Be polite.| Answer in English.| Answer the user.| Help the user.| Use the tools if needed.| Be correct.]",
    "[Today is|It is] [Monday|Tuesday|Friday|Sunday]. You are [a|the] [helpful |friendly |]assistant.[| Answer questions.]", "[Your name is|You are called] [guide|Guide|Swarm|Helper].[| Answer questions about SwarmLLM.| Help users.]",
)
"""Patterns, as the questions are."""
