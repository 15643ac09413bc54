use super::*;

#[test]
fn only_what_a_fault_led_to_is_asked_for() {
    let mut away = InFlight::new();
    away.asks(Some(LAST_PAGE));
    assert!(away.draft(ChunkNo(1), ServerId(1)).expect("a buffer").0.unasked);
    away.asks(Some(ChunkNo(2).first()));
    assert!(!away.draft(ChunkNo(2), ServerId(1)).expect("a buffer").0.unasked);
    assert!(away.has_buffers(MAX_REMOTE_READS - 2) && !away.has_buffers(MAX_REMOTE_READS - 1));
}

#[test]
fn who_waits_for_what_is_under_way_is_known() {
    let mut away = InFlight::new();
    let page = |k| ChunkNo(7).first().plus(k);
    away.draft(ChunkNo(7), ServerId(1)).expect("a buffer").1.wanted = 0b110;
    assert!(!away.is_awaited() && away.bytes() == 2 * PAGE_SIZE);
    assert!(!away.begin_wait(page(0)) && !away.is_awaited(), "that one was not sent for");
    assert!(away.begin_wait(page(2)) && away.is_awaited());
}

#[test]
fn pages_of_a_chunk_go_together_and_each_order_has_a_seat_of_its_own() {
    let mut away = InFlight::new();
    let (here, there) = (ServerId(1), ServerId(2));
    let page = |chunk: usize, k| ChunkNo(chunk).first().plus(k);
    for (k, server) in [(1, here), (4, here), (6, there)] {
        let (order, sent) = away.draft(ChunkNo(7), server).expect("a buffer");
        sent.wanted |= 1 << k;
        order.wanted = sent.wanted;
    }
    assert_eq!(
        away.drafts.iter().map(|order| (order.wanted, order.server)).collect::<Vec<_>>(),
        [(0b10010, here), (0x40, there)]
    );
    assert!(
        away.has(page(7, 4))
            && away.has(page(7, 6))
            && !away.has(page(7, 5))
            && !away.has(page(8, 4))
    );
    // What was sent is no draft any more.
    away.drafts.clear();
    let buffers: Vec<usize> = (0..MAX_REMOTE_READS - 2)
        .map(|n| away.draft(ChunkNo(7 + n), there).expect("a buffer").0.buffer)
        .collect();
    assert!(buffers.iter().zip(2..).all(|(buffer, n)| *buffer == n), "{buffers:?}");
    assert!(away.draft(ChunkNo(1000), there).is_none(), "all buffers are taken");
    assert!(
        away.draft(ChunkNo(7 + MAX_REMOTE_READS - 3), there).is_some(),
        "the last one has its buffer"
    );
    assert!(away.draft(ChunkNo(7 + MAX_REMOTE_READS - 3), here).is_none());
}

#[test]
fn sending_is_usual_for_a_while() {
    let mut away = InFlight::new();
    assert!(!away.is_usual());
    away.quiet = 0;
    for _ in 0..RARE_AFTER_FAULTS - 1 {
        away.asks(None);
        assert!(away.is_usual());
    }
    away.asks(None);
    assert!(!away.is_usual());
}
