# SPDX-License-Identifier: Apache-2.0
"""Which layer of a teacher a layer of the student belongs to."""

from __future__ import annotations


def uniform(student: int, teacher: int) -> list[int]:
    """For each of the student's layers the number of teacher layers up to its counterpart, evenly: of 4 and 12 layers
    3, 6, 9, 12. States after them are compared, and the attention of the teacher's layer before (2, 5, 8, 11 from 0).

    Raises:
        ValueError: the student has more layers.
    """
    check_depth(student, teacher)
    return [round((index + 1) * teacher / student) for index in range(student)]


def check_depth(student: int, teacher: int) -> None:
    """Refuses a student with more layers than its teacher."""
    if student > teacher:
        raise ValueError(
            f"the student has {student} layers and the teacher {teacher}, so that some would have no counterpart; take"
            " a student of at most as many, or --method distilbert, which compares the last layers alone"
        )


def patient(student: int, teacher: int, strategy: str) -> list[int]:
    """For the student's layers 1 to the last but one, the teacher's: every k-th ('skip': 2, 4, 6, 8, 10 of 12 for 6),
    or its last but one and those before ('last': 7 to 11). The last layers meet in the predictions (Sun et al. 2019,
    arXiv 1908.09355, section 3.1)."""
    check_depth(student, teacher)
    if strategy == "last":
        return [teacher - student + index for index in range(1, student)]
    return uniform(student, teacher)[:-1]


def copied(choice: str, student: int, teacher: int) -> list[int]:
    """The teacher's layers, from 0 on, that a student of `student` layers starts from.

    choice: 'first', 'last', 'alternate' (evenly, from the first one on: 0, 2, 4, ...), or numbers such as '0,2,5'.

    Raises:
        ValueError: an unknown choice, layers that the teacher lacks, or not as many as the student has.
    """
    if student > teacher and choice in ("first", "last", "alternate"):
        raise ValueError(
            f"a student of {student} layers cannot be copied from {teacher} of the teacher; take at most as many, name"
            " them one by one (--copy_layers 0,0,1,1), or let it start from scratch (--student scratch)"
        )
    if choice == "first":
        return list(range(student))
    if choice == "last":
        return list(range(teacher - student, teacher))
    if choice == "alternate":
        return [index * teacher // student for index in range(student)]
    parts = [part.strip() for part in choice.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(
            f"--copy_layers is 'first', 'last', 'alternate' or numbers such as '0,2,5', not {choice!r}; correct it"
        )
    numbers = [int(part) for part in parts]
    if max(numbers) >= teacher:
        raise ValueError(
            f"--copy_layers {choice} names layer {max(numbers)}, and the teacher has {teacher}, numbered from 0 on;"
            " correct it"
        )
    if len(numbers) != student:
        raise ValueError(
            f"--copy_layers {choice} names {len(numbers)} layers for a student of {student}; name as many, or leave"
            " --student.num_hidden_layers out"
        )
    return numbers
