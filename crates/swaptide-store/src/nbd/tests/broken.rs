//! Connections that break or are late, and servers that do not answer.

use std::time::Instant;

use super::*;

#[test]
fn requests_resent_after_connection_breaks() {
    // Each connection answers a few more requests than the one before, and hangs up in the middle
    // of the next reply.
    let lab = Lab::new(|peer| {
        for _ in 0..2 + 3 * peer.number {
            let Some(asked) = peer.ask() else { return };
            peer.answer(&asked);
        }
        let Some(asked) = peer.ask() else { return };
        if asked.command == wire::READ {
            let mut reply = chunk(
                1,
                wire::CHUNK_DATA,
                asked.cookie,
                &[&asked.offset.to_be_bytes()[..], &[0x55; 4096]].concat(),
            );
            reply.truncate(20 + 8 + 1234);
            peer.send(&reply);
        }
    });
    let nbd = lab.client(export(), options());
    let data: Vec<[u8; PAGE_SIZE]> = (0..40).map(|i| [i as u8 + 1; PAGE_SIZE]).collect();
    let places: Vec<(u64, &[u8])> =
        data.iter().enumerate().map(|(i, page)| (i as u64 * PAGE, &page[..])).collect();
    assert_eq!(nbd.write_many(&places), Ok(()));
    let mut back = vec![[0u8; PAGE_SIZE]; 40];
    let mut places: Vec<(u64, &mut [u8])> =
        (0..).map(|i| i * PAGE).zip(back.iter_mut().map(|page| &mut page[..])).collect();
    assert_eq!(nbd.read_many(&mut places), Ok(()));
    assert!(back == data);
    let stats = nbd.stats();
    assert!(stats.replayed > 40 && stats.broken >= 5 && stats.dialed > stats.broken, "{stats:?}");
    assert_eq!((stats.given_up, stats.refused, stats.garbled, stats.late), (0, 0, 0, 0));
}

#[test]
fn server_restart_in_time_loses_nothing() {
    // 12 attempts fail, that is about a second; writes wait as long here.
    let lab = Lab::new(|peer| {
        if peer.number == 0 {
            peer.ask();
            return;
        }
        peer.serve();
    })
    .refusing(|number| (1..9).contains(&number).then_some(Errno::CONNREFUSED));
    let nbd = lab.client(export(), options());
    let (answer, data) = guarded_read(&nbd, 8192, 20000);
    assert_eq!((answer, &data), (Ok(20000), &lab.on_disk(8192, 20000)));
    let stats = nbd.stats();
    assert_eq!((stats.dialed, stats.dial_failed, stats.replayed), (2, 8, 1));
}

#[test]
fn read_without_free_descriptor_reports_it() {
    let lacks = Arc::new(AtomicU32::new(1));
    let lab = {
        let lacks = Arc::clone(&lacks);
        Lab::new(Peer::serve).refusing(move |_| (lacks.load(SeqCst) == 1).then_some(Errno::MFILE))
    };
    let timeout = Duration::from_millis(50);
    let hasty = Options { read_timeout: timeout, write_timeout: timeout, ..options() };
    let nbd = lab.client(export(), hasty);
    assert_eq!(guarded_read(&nbd, 0, 4096).0, Err(Errno::MFILE));
    assert_eq!(nbd.write_at(0, &[1; 4096]), Err(Errno::TIMEDOUT), "it goes elsewhere");
    lacks.store(0, SeqCst);
    assert_eq!(guarded_read(&nbd, 0, 4096).0, Ok(4096));
    let stats = nbd.stats();
    assert_eq!((stats.given_up, stats.refused), (2, 0));
}

#[test]
fn reply_after_timeout_is_discarded() {
    // Each read is answered with what is on the disk then, after a while.
    let delay = Arc::new(AtomicU32::new(0));
    let lab = {
        let delay = Arc::clone(&delay);
        Lab::new(move |peer: &mut Peer| {
            while let Some(asked) = peer.ask() {
                std::thread::sleep(Duration::from_millis(delay.load(SeqCst).into()));
                peer.answer(&asked);
            }
        })
    };
    let slow = Options {
        request_limit: Duration::from_millis(400),
        read_timeout: Duration::from_millis(800),
        ..options()
    };
    let nbd = lab.client(export(), slow);
    delay.store(200, SeqCst);
    assert_eq!(guarded_read(&nbd, 4096, 4096), (Ok(4096), lab.on_disk(4096, 4096)));
    assert_eq!(nbd.stats().late, 0, "it is slow, and waited for");
    // Later than a request is waited for: it is asked for again, and that is as late.
    delay.store(600, SeqCst);
    let start = Instant::now();
    assert_eq!(guarded_read(&nbd, 8192, 4096).0, Err(Errno::TIMEDOUT));
    assert!(start.elapsed() >= slow.read_timeout);
    delay.store(0, SeqCst);
    // The answers to what was given up come about now; they are not taken for others.
    for block in 0..100 {
        let offset = block % 7 * 4096;
        assert_eq!(guarded_read(&nbd, offset, 4096), (Ok(4096), lab.on_disk(offset, 4096)));
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(nbd.stats().garbled, 0);
}

#[test]
fn writes_fail_fast_after_a_timeout() {
    let refuse = Arc::new(AtomicU32::new(1));
    let lab = {
        let refuse = Arc::clone(&refuse);
        Lab::new(Peer::serve)
            .refusing(move |_| (refuse.load(SeqCst) == 1).then_some(Errno::CONNREFUSED))
    };
    let timeout = Duration::from_millis(150);
    let nbd = lab.client(
        export(),
        Options { read_timeout: 2 * timeout, write_timeout: timeout, ..options() },
    );
    let start = Instant::now();
    assert_eq!(guarded_read(&nbd, 0, 4096).0, Err(Errno::TIMEDOUT));
    assert!(start.elapsed() >= 2 * timeout);
    let start = Instant::now();
    assert_eq!(nbd.write_at(0, &[1; 4096]), Err(Errno::TIMEDOUT));
    assert!(start.elapsed() >= timeout);
    // The server is back, but that takes a while to be noticed by those that can go elsewhere;
    // reads try at once.
    refuse.store(0, SeqCst);
    let dialed = lab.dialed.load(SeqCst);
    assert_eq!(nbd.write_at(0, &[1; 4096]), Err(Errno::TIMEDOUT));
    assert_eq!(nbd.trim(0, 4096), Err(Errno::TIMEDOUT));
    assert_eq!(nbd.write_many(&[(0, &[1; 4096])]), Err((0, Errno::TIMEDOUT)));
    assert_eq!(lab.dialed.load(SeqCst), dialed);
    assert_eq!(guarded_read(&nbd, 0, 4096).0, Ok(4096));
    std::thread::sleep(WRITE_BACKOFF);
    assert_eq!(nbd.write_at(0, &[1; 4096]), Ok(4096));
    assert_eq!(nbd.stats().given_up, 2);
}

#[test]
fn a_late_server_is_left_for_another_connection() {
    // The first connection answers nothing; the second is slow, but not too slow; and trickling is
    // no answer.
    let lab = Lab::new(|peer| match peer.number {
        0 => while peer.ask().is_some() {},
        1 => {
            let Some(asked) = peer.ask() else { return };
            let whole = chunk(1, wire::CHUNK_DATA, asked.cookie, &[0; 8 + 4096]);
            for byte in whole {
                peer.send(&[byte]);
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        _ => {
            while let Some(asked) = peer.ask() {
                std::thread::sleep(Duration::from_millis(50));
                peer.answer(&asked);
            }
        }
    });
    let nbd = lab.client(export(), options());
    let (answer, data) = guarded_read(&nbd, 4096, 4096);
    assert_eq!((answer, &data), (Ok(4096), &lab.on_disk(4096, 4096)));
    let stats = nbd.stats();
    assert_eq!((stats.dialed, stats.late, stats.broken, stats.replayed), (3, 2, 2, 2));
}

#[test]
fn a_server_that_sends_without_answering_times_out() {
    let lab = Lab::new(|peer| {
        let Some(asked) = peer.ask() else { return };
        if peer.number == 0 {
            let mut more = error_chunk(asked.cookie, 5, &[b'x'; 4000]);
            // Not the last chunk: the answer never ends.
            more[5] = 0;
            while peer.stream.write_all(&more).is_ok() {}
            return;
        }
        peer.answer(&asked);
    });
    let nbd = lab.client(export(), options());
    let (answer, data) = guarded_read(&nbd, 4096, 4096);
    assert_eq!((answer, &data), (Ok(4096), &lab.on_disk(4096, 4096)));
    assert_eq!(nbd.stats().late, 1);
}

#[test]
fn late_write_replayed_after_server_hangs_up() {
    // The first connection holds its write back until the client hangs up, does it then, and only
    // then ends.
    let order = Arc::new(Mutex::new(Vec::new()));
    let lab = {
        let order = Arc::clone(&order);
        Lab::new(move |peer| {
            let asked = peer.ask().expect("a write");
            if peer.number == 0 {
                assert!(peer.ask().is_none());
                std::thread::sleep(Duration::from_millis(50));
            }
            order.lock().unwrap().push(peer.number);
            peer.answer(&asked);
            if peer.number > 0 {
                peer.serve();
            }
        })
    };
    let nbd = lab.client(export(), Options { drain: Duration::from_secs(20), ..options() });
    assert_eq!(nbd.write_at(0, &[9; 4096]), Ok(4096));
    assert_eq!(*order.lock().unwrap(), [0, 1]);
    assert_eq!(nbd.stats().late, 1);
}

#[test]
fn a_change_that_was_sent_and_not_answered_is_in_doubt() {
    let data = [7; 300 << 10];
    let one = |script: fn(&mut Peer), options: Options| {
        let lab = Lab::new(script);
        lab.client(export(), options).write_surely(0, &data)
    };
    let (answered, in_doubt) = (Certainty::Answered, Certainty::InDoubt);
    assert_eq!(one(Peer::serve, options()), (Ok(data.len()), answered));
    // It hangs up before it has read all of the first request, and a replay succeeds.
    let partly = |peer: &mut Peer| {
        if peer.number == 0 {
            peer.stream.read_exact(&mut [0; 100]).unwrap();
        } else {
            peer.serve();
        }
    };
    assert_eq!(one(partly, options()), (Ok(data.len()), in_doubt));
    // It is late, and the replay succeeds.
    let late = |peer: &mut Peer| {
        if peer.number == 0 { while peer.ask().is_some() {} } else { peer.serve() }
    };
    assert_eq!(one(late, options()), (Ok(data.len()), in_doubt));
    // It is silent until the timeout.
    let silent = |peer: &mut Peer| while peer.ask().is_some() {};
    let hasty = Options {
        write_timeout: Duration::from_millis(100),
        request_limit: Duration::from_secs(9),
        ..options()
    };
    assert_eq!(one(silent, hasty), (Err(Errno::TIMEDOUT), in_doubt));
    // An error is an answer.
    let refuses = |peer: &mut Peer| {
        while let Some(asked) = peer.ask() {
            peer.send(&simple(asked.cookie, 5, &[]));
        }
    };
    assert_eq!(one(refuses, options()), (Err(Errno::IO), answered));
    // Nothing was sent.
    let unused = Lab::new(Peer::serve).refusing(|_| Some(Errno::CONNREFUSED));
    let nbd = unused.client(export(), hasty);
    assert_eq!(nbd.write_surely(0, &data), (Err(Errno::TIMEDOUT), answered));
    // A trim like a write; reads change nothing.
    let lab = Lab::new(|peer| if peer.number % 2 == 0 { drop(peer.ask()) } else { peer.serve() });
    let nbd = lab.client(export(), options());
    assert_eq!(nbd.trim_surely(0, SIZE), (Ok(()), in_doubt));
    assert_eq!(guarded_read(&nbd, 0, 4096).0, Ok(4096));
}
