"""Short openings from which the target itself writes user turns.

An opening only sets the direction; everything after it is sampled from the target. Code openings
use the public benchmark wrapper, so the turns have the shape of "complete this function".
"""

from __future__ import annotations

import random
from dataclasses import dataclass

CHAT, CODE, MATHS = 0, 1, 2

CODE_WRAPPER = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
)
CODE_HEADS = (
    "", "\n", "\n\n", "from typing import List\n\n\n", "from typing import List\n\n\n",
    "from typing import List, Tuple\n\n\n", "from typing import Optional\n\n\n",
    "from typing import List, Any\n\n\n", "import math\n\n\n", "import re\n\n\n",
)  # fmt: skip
VERBS = (
    "count", "find", "get", "is", "check", "remove", "sort", "sum", "filter", "reverse", "max",
    "min", "convert", "compute", "calculate", "merge", "split", "make", "has", "largest",
    "smallest", "longest", "shortest", "closest", "change", "encode", "decode", "rotate",
    "generate", "select", "can", "valid", "add", "multiply", "digits", "even", "odd", "prime",
    "unique", "common", "total", "double", "string", "number", "solve", "flip", "parse",
    "concatenate", "triangle", "median", "product", "minimum", "maximum", "cycle", "vowels",
    "search", "compare", "fix", "list", "apply", "update", "group", "shift", "swap", "trim",
    "replace", "collect", "normalize", "format", "repeat", "expand", "map", "insert", "delete",
    "join",
)  # fmt: skip
NOUNS = (
    "list", "numbers", "string", "words", "digits", "elements", "primes", "pairs", "vowels",
    "sum", "characters", "matrix", "array", "sequence", "substring", "duplicates", "palindrome",
    "brackets", "parentheses", "values", "integers", "index", "element", "product", "factors",
    "dict", "evens", "odds", "grid", "triangle", "letters", "prefixes", "balance", "text", "file",
    "name", "date", "password", "binary", "decimal", "fibonacci", "square", "cube", "power",
)  # fmt: skip
ARGUMENTS = (
    "n", "s", "lst", "arr", "numbers", "text", "a, b", "x", "x, y", "l", "string", "n, m",
    "numbers: List[int]", "numbers: List[float]", "strings: List[str]", "string: str", "n: int",
    "text: str", "s: str", "l: list", "a: int, b: int", "lst, k", "arr, k", "nums", "words",
    "s, n", "x: int, y: int", "message", "sentence", "date", "array", "items", "values", "data",
    "items: List[int]", "a: float, b: float", "value: int", "word: str", "words: List[str]",
    "matrix: List[List[int]]", "start, end", "first, second",
)  # fmt: skip
RETURNS = (
    "", "", "", " -> int", " -> bool", " -> str", " -> List[int]", " -> List[str]", " -> float",
)  # fmt: skip
DOC_STARTS = (
    "", "", "", " Return", " Given", " You are given", " Check if", " Write a function", " Find",
    " Returns", " From", " For a given", " Create a function", " Filter", " Count", " Input",
    "\n    Given", "\n    Write a function that", "\n    You are given",
    "\n    Create a function", "\n    This function", "\n    Return", "\n    In this",
    "\n    You have", "\n    Your task", "\n    A", "\n    Implement", "\n    The",
    "\n    Complete the function that", "\n    I",
)  # fmt: skip
DOC_SENTENCES = (
    "Return the {a} of the given {n}.", "Given a {n}, return the {a} of its elements.",
    "Check if the given {n} contains any {a}.",
    "Return True if the {n} is {q}, and False otherwise.", "Find the {a} in {n}.",
    "Return a list of all {a} in the {n}.", "Count the number of {a} in {n}.",
    "Remove all {a} from the {n}.", "For a given {n}, return the {a} that comes first.",
    "Write a function that takes a {n} and returns its {a}.", "Sort the {n} by its {a}.",
    "Create a function that returns the {a} of a {n}, or None if the {n} is empty.",
    "You are given a {n}. Return the number of {a} in it.", "Convert the {n} to its {a}.",
    "Given two integers, return the {a} of both.", "Filter an input {n} only for {a}.",
    "Return a tuple of the {a} and the {b} of the {n}.",
    "Insert {a} between every two {b} of {n}.", "Return the n-th {a}.",
    "This function takes a {n} and returns the {a} without {b}.",
    "Implement a function that checks whether the {n} is {q}.", "Replace each {a} with a {b}.",
    "Given a positive integer n, return the {a} of its digits.", "Return the {n} in reverse {a}.",
)  # fmt: skip
DOC_OBJECTS = (
    "list of integers", "list of numbers", "string", "list of strings", "sentence", "array",
    "non-empty list", "dictionary", "list of words", "text", "matrix", "integer", "word", "tuple",
    "list of floats", "string of parentheses", "binary string", "nested list", "range",
    "sequence",
)  # fmt: skip
DOC_PARTS = (
    "sum", "product", "largest element", "smallest element", "even numbers", "odd numbers",
    "vowels", "consonants", "duplicates", "unique elements", "prime numbers", "longest word",
    "shortest string", "palindromes", "digits", "uppercase letters", "lowercase letters",
    "spaces", "common elements", "average", "median", "maximum", "minimum", "positive numbers",
    "negative numbers", "divisors", "factors", "prefixes", "substrings", "closest numbers",
    "second largest element", "order", "last digit", "first character", "indices", "pairs",
    "powers of two", "perfect squares",
)  # fmt: skip
DOC_QUALITIES = (
    "sorted", "a palindrome", "a prime number", "even", "valid", "balanced", "empty",
    "increasing", "a perfect square", "in uppercase", "divisible by three", "a power of two",
    "symmetric", "happy",
)  # fmt: skip
NAMES = (
    "James", "Mary", "John", "Emma", "Tom", "Sarah", "Jerry", "Mike", "Lisa", "Anna", "Ben",
    "Kate", "Maria", "Peter", "Grace", "Tim", "Carlos", "Bella", "Henry", "Ann", "Sam", "Alex",
    "Dana", "Kim", "Lucy", "David", "Noah", "Olivia", "Jack", "Stephen", "Judy", "Martha",
    "Nancy", "Frank", "Brandon", "Mark", "Billy", "Adam", "Sophie", "Harry", "Kelly", "Joe",
    "Daniel", "Laura", "Robert", "Susan", "Kevin", "Rachel", "Paul", "Emily", "Andrew", "Julia",
    "Chris", "Amy", "Luke", "Hannah", "Ryan", "Chloe", "Eric", "Zoe", "Oscar", "Ella",
)  # fmt: skip
MATHS_TAILS = (
    "", "", " has", " buys", " is", " bought", " sells", " made", " earns", " wants to", " works",
    " went to", " and", "'s", " had", " gets", " needs", " runs", " takes", " eats", " collects",
    " spends", " drives", " can", " reads", " saved", " goes", " owns",
)  # fmt: skip
MATHS_STARTS = (
    "A", "If", "There are", "The", "In a", "Each", "At a", "Every day,", "An", "On Monday,",
    "A store", "A farmer", "A box of", "A school", "A bakery", "During", "In", "Half of", "Mr.",
    "Mrs.", "The price of", "It takes", "A baker", "A company", "A class of", "For every",
    "This year,", "The cost of", "How many", "The sum of", "When", "After", "A teacher",
    "A group of", "To make", "Last week,", "The total", "A book",
)  # fmt: skip
CHAT_STARTS = (
    "Write", "Compose", "Draft", "Describe", "Explain", "What", "How", "Why", "Can you",
    "Could you", "Imagine", "Pretend", "You are", "Act as", "Please", "Suppose", "Given", "Edit",
    "Rewrite", "Summarize", "Create", "Design", "Provide", "List", "Compare", "Discuss",
    "Analyze", "Identify", "Extract", "Classify", "Evaluate", "Translate", "Which", "Who", "Is",
    "Are", "Should", "If", "Tell me", "Give me", "I want", "I am", "I'm", "I need", "Help me",
    "Let's", "Take on the role", "Imagine you are", "Develop", "Implement", "Use", "Find",
    "Solve", "The following", "Here is", "Read the", "In the", "Read", "What is the", "What are",
    "How can", "How do", "How does", "How would", "What if", "Describe a", "Write a",
    "Write a persuasive", "Write a short story", "Write a poem", "Write a function",
    "Write a program", "Write a Python", "Write an email", "Write a blog post", "Compose a",
    "Draft a professional email", "Write a descriptive paragraph", "Could", "Explain the",
    "Explain the concept of", "Describe the", "What causes", "Explain how", "Discuss the",
    "What role", "How did", "Consider", "Assume", "The", "A", "Two", "Analyze the", "Extract the",
    "Identify the", "Determine", "Construct", "Share", "Outline", "Suggest", "Recommend",
    "Generate", "Produce", "Hi", "Hello", "My", "Do you", "Teach me", "Show me", "Make",
    "What would", "When", "Where", "Does", "Would", "There is", "We", "This", "In this",
    "Explain why", "Write the", "Come up with", "Prove", "Calculate", "Review", "Convert",
)  # fmt: skip


@dataclass(frozen=True)
class Opening:
    """The first words of a user turn and its kind."""

    text: str
    kind: int


def code_opening(rng: random.Random) -> Opening:
    """Return the wrapper plus the start of a function."""
    text = CODE_WRAPPER + rng.choice(CODE_HEADS)
    form = rng.random()
    if form < 0.12:
        return Opening(text, CODE)
    name = rng.choice(VERBS)
    if rng.random() < 0.6:
        name += "_" + rng.choice(NOUNS)
    text += f"def {name}"
    if form < 0.35:
        return Opening(text, CODE)
    text += f"({rng.choice(ARGUMENTS)}){rng.choice(RETURNS)}:\n"
    text += '    """'
    if form < 0.65:
        return Opening(text + rng.choice(DOC_STARTS), CODE)
    sentence = rng.choice(DOC_SENTENCES).format(
        a=rng.choice(DOC_PARTS),
        b=rng.choice(DOC_PARTS),
        n=rng.choice(DOC_OBJECTS),
        q=rng.choice(DOC_QUALITIES),
    )
    text += rng.choice((" ", "\n    ")) + sentence
    if form < 0.75:
        return Opening(text, CODE)
    example = rng.choice((f">>> {name}(", f">>> {name}(", f"{name}(", "For example", "Example"))
    return Opening(f"{text}\n    {example}", CODE)


def maths_opening(rng: random.Random) -> Opening:
    """Return the first words of a word problem."""
    if rng.random() < 0.6:
        return Opening(rng.choice(NAMES) + rng.choice(MATHS_TAILS), MATHS)
    return Opening(rng.choice(MATHS_STARTS), MATHS)


def chat_opening(rng: random.Random) -> Opening:
    """Return the first words of a chat turn, or nothing at all."""
    return Opening("" if rng.random() < 0.25 else rng.choice(CHAT_STARTS), CHAT)


def draw(rng: random.Random, shares: tuple[float, float, float]) -> Opening:
    """Draw an opening of a random kind."""
    kind = rng.choices((CHAT, CODE, MATHS), weights=shares)[0]
    return (chat_opening, code_opening, maths_opening)[kind](rng)
