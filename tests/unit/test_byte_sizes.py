from fsdplaunch.display_text import size_words


def test_sizes_are_written_in_powers_of_1024():
    assert [size_words(n) for n in (0, 1023, 1024, 1536 * 2**20, 3000 * 2**40)] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KiB",
        "1.5 GiB",
        "3000.0 TiB",
    ]
