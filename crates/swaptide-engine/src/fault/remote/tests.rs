use super::*;

use swaptide_core::{SwapOffset, SwapType};

#[test]
fn only_what_a_fault_led_to_is_asked_for() {
    let mut in_flight = InFlight::new();
    in_flight.asks(Some(LAST_PAGE));
    assert!(in_flight.draft(ChunkNo(1), ServerId(1)).expect("a buffer").0.unasked);
    in_flight.asks(Some(ChunkNo(2).first()));
    assert!(!in_flight.draft(ChunkNo(2), ServerId(1)).expect("a buffer").0.unasked);
    assert!(
        in_flight.has_buffers(MAX_REMOTE_READS - 2) && !in_flight.has_buffers(MAX_REMOTE_READS - 1)
    );
}

#[test]
fn waiting_threads_are_known_per_page() {
    let mut in_flight = InFlight::new();
    let page = |k| ChunkNo(7).first().plus(k);
    let entry = |at| SwapEntry::new(SwapType::new(1).expect("a type"), SwapOffset(at));
    let sent = in_flight.draft(ChunkNo(7), ServerId(1)).expect("a buffer").1;
    (sent.wanted, sent.entries[2]) = (0b110, entry(5));
    assert!(!in_flight.is_awaited() && in_flight.bytes() == 2 * PAGE_SIZE);
    for (k, at) in [(0, 5), (2, 6)] {
        let waits = in_flight.begin_wait(page(k), entry(at));
        assert!(!waits && !in_flight.is_awaited(), "{k} at {at}: that one was not sent for");
    }
    assert!(in_flight.begin_wait(page(2), entry(5)) && in_flight.is_awaited());
}

#[test]
fn pages_of_a_chunk_share_a_read_and_each_read_has_a_buffer() {
    let mut in_flight = InFlight::new();
    let (here, there) = (ServerId(1), ServerId(2));
    let page = |chunk: usize, k| ChunkNo(chunk).first().plus(k);
    for (k, server) in [(1, here), (4, here), (6, there)] {
        let (order, sent) = in_flight.draft(ChunkNo(7), server).expect("a buffer");
        sent.wanted |= 1 << k;
        order.wanted = sent.wanted;
    }
    assert_eq!(
        in_flight.drafts.iter().map(|order| (order.wanted, order.server)).collect::<Vec<_>>(),
        [(0b10010, here), (0x40, there)]
    );
    assert!(
        in_flight.has(page(7, 4))
            && in_flight.has(page(7, 6))
            && !in_flight.has(page(7, 5))
            && !in_flight.has(page(8, 4))
    );
    // What was sent is no draft any more.
    in_flight.drafts.clear();
    let buffers: Vec<usize> = (0..MAX_REMOTE_READS - 2)
        .map(|n| in_flight.draft(ChunkNo(7 + n), there).expect("a buffer").0.buffer)
        .collect();
    assert!(buffers.iter().zip(2..).all(|(buffer, n)| *buffer == n), "{buffers:?}");
    assert!(in_flight.draft(ChunkNo(1000), there).is_none(), "all buffers are taken");
    assert!(
        in_flight.draft(ChunkNo(7 + MAX_REMOTE_READS - 3), there).is_some(),
        "the last one has its buffer"
    );
    assert!(in_flight.draft(ChunkNo(7 + MAX_REMOTE_READS - 3), here).is_none());
}

#[test]
fn sending_is_usual_for_a_while() {
    let mut in_flight = InFlight::new();
    assert!(!in_flight.is_usual());
    in_flight.quiet = 0;
    for _ in 0..RARE_AFTER_FAULTS - 1 {
        in_flight.asks(None);
        assert!(in_flight.is_usual());
    }
    in_flight.asks(None);
    assert!(!in_flight.is_usual());
}
