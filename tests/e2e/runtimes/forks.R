# Vectors and lists larger than the budget, and forked children (mclapply) that compute on what they
# share.
size <- as.integer(commandArgs(TRUE)[1])
make <- function(worker) {
    set.seed(worker)
    list(numbers = runif(size), names = as.character(seq_len(size %/% 8)))
}
data <- lapply(1:4, make)
digest <- function(one) {
    ordered <- sort(one$numbers)
    c(sum(ordered[seq(1, size, 97)]), sum(nchar(one$names)), length(unique(one$names)))
}
first <- sapply(data, digest)
forked <- parallel::mclapply(1:4, function(worker) digest(data[[worker]]), mc.cores = 3)
again <- sapply(data, digest)
stopifnot(identical(first, again), identical(first, sapply(forked, identity)))
print(first, digits = 15)
