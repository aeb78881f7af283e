from threadpoolctl import threadpool_info, threadpool_limits

from strucspars.sparsify.orders import one_blas_thread


def blas_threads() -> set[int]:
    return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}


def test_the_limit_holds_until_the_last_has_left_and_then_no_more() -> None:
    first, second = one_blas_thread(), one_blas_thread()
    with threadpool_limits(limits=2, user_api="blas"):
        first.__enter__()
        second.__enter__()
        assert blas_threads() == {1}
        first.__exit__(None, None, None)
        assert blas_threads() == {1}
        second.__exit__(None, None, None)
        assert blas_threads() == {2}
        with one_blas_thread():
            assert blas_threads() == {1}
        assert blas_threads() == {2}
