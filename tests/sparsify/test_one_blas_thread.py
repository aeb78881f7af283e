from threadpoolctl import threadpool_info, threadpool_limits

from strucspars.sparsify.layers import OneBlasThread


def blas_threads() -> set[int]:
    return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}


def test_the_limit_holds_until_the_last_has_left_and_then_no_more() -> None:
    limit = OneBlasThread()
    with threadpool_limits(limits=2, user_api="blas"):
        limit.__enter__()
        limit.__enter__()
        assert blas_threads() == {1}
        limit.__exit__(None, None, None)
        assert blas_threads() == {1}
        limit.__exit__(None, None, None)
        assert blas_threads() == {2}
        with limit:
            assert blas_threads() == {1}
        assert blas_threads() == {2}
