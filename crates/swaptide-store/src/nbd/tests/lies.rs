//! A server that lies, about what it read, what it wrote and what it was asked.

use std::time::Instant;

use super::*;

/// A hostile server's replies to a read of 4096 bytes, and a flag that another connection has to be
/// asked.
fn lies(asked: &Asked) -> Vec<(&'static str, Vec<u8>)> {
    let cookie = asked.cookie;
    let at = |offset: u64, len: usize| [&offset.to_be_bytes()[..], &vec![0x66; len]].concat();
    let data = |offset: u64, len: usize| chunk(1, wire::CHUNK_DATA, cookie, &at(offset, len));
    let part = |offset: u64, len: usize| chunk(0, wire::CHUNK_DATA, cookie, &at(offset, len));
    let hole = |offset: u64, len: u32| {
        chunk(
            1,
            wire::CHUNK_HOLE,
            cookie,
            &[&offset.to_be_bytes()[..], &len.to_be_bytes()].concat(),
        )
    };
    let end = chunk(1, wire::CHUNK_NONE, cookie, &[]);
    let here = asked.offset;
    let mut endless = chunk(1, wire::CHUNK_DATA, cookie, &at(here, 4096));
    endless[16..20].copy_from_slice(&u32::MAX.to_be_bytes());
    let mut many = Vec::new();
    for i in (0..4096).step_by(2) {
        many.extend(part(here + i, 1));
    }
    vec![
        ("no magic", vec![0; 64]),
        ("a request", wire::request(0, 0, cookie, here, 4096).to_vec()),
        ("another's cookie", simple(cookie + 1, 0, &[0x66; 4096])),
        ("the cookie of another call", simple(cookie ^ 1 << 40, 0, &[0x66; 4096])),
        ("the cookie of a number that there is not", simple(cookie | 1023, 0, &[0x66; 4096])),
        ("more than was asked for", data(here, 4097)),
        ("less than was asked for", data(here, 4095)),
        ("the byte before", data(here - 1, 4096)),
        ("the byte after", data(here + 1, 4096)),
        ("far away", data(u64::MAX - 3, 4096)),
        ("a length without end", endless),
        ("the same twice", [part(here, 4096), data(here, 4096)].concat()),
        ("an overlap", [part(here, 2048), data(here + 2047, 2049)].concat()),
        ("an overlap behind", [part(here + 2048, 2048), data(here, 2049)].concat()),
        ("a gap", [part(here, 2047), data(here + 2048, 2048)].concat()),
        ("nothing", end.clone()),
        ("nothing, with something", chunk(1, wire::CHUNK_NONE, cookie, b"x")),
        ("nothing, without end", chunk(0, wire::CHUNK_NONE, cookie, &[])),
        ("data of no bytes", data(here, 0)),
        ("data without a place", chunk(1, wire::CHUNK_DATA, cookie, &[0; 7])),
        ("a hole of no bytes", [hole(here, 0), end.clone()].concat()),
        ("a hole that is too long", hole(here, 4097)),
        ("a hole around the end of numbers", hole(u64::MAX, u32::MAX)),
        ("a hole of a wrong length", chunk(1, wire::CHUNK_HOLE, cookie, &[0; 13])),
        ("a kind that is not known", chunk(1, 7, cookie, &[0; 16])),
        ("an error without a number", chunk(1, 0x8001, cookie, &[0; 5])),
        ("an error of nothing", chunk(1, 0x8001, cookie, &[0; 6])),
        ("an error with a long text", chunk(1, 0x8001, cookie, &[5; 9000])),
        (
            "an error whose text is longer than it",
            chunk(1, 0x8001, cookie, &[0, 0, 0, 5, 0, 9, b'x']),
        ),
        ("pieces without end", many),
        ("two replies", [data(here, 4096), data(here, 4096)].concat()),
        ("it shuts down", simple(cookie, wire::SHUTDOWN, &[])),
        ("it shuts down, in many words", error_chunk(cookie, wire::SHUTDOWN, b"good night")),
        ("the end", Vec::new()),
    ]
}

#[test]
fn false_reply_is_rejected() {
    let count =
        lies(&Asked { flags: 0, command: 0, cookie: 0, offset: 4096, len: 4096, data: Vec::new() })
            .len();
    for number in 0..count {
        let name = Arc::new(Mutex::new(""));
        let lab = {
            let name = Arc::clone(&name);
            Lab::new(move |peer| {
                let Some(asked) = peer.ask() else { return };
                if peer.number == 0 {
                    let (what, lie) = lies(&asked).swap_remove(number);
                    *name.lock().unwrap() = what;
                    peer.send(&lie);
                    return;
                }
                peer.answer(&asked);
                peer.serve();
            })
        };
        let nbd = lab.client(export(), options());
        let (answer, data) = guarded_read(&nbd, 8192, 4096);
        let name = *name.lock().unwrap();
        assert_eq!(answer, Ok(4096), "{name}");
        // Two replies: the first one counts, and only the tag of the sealed page can tell that
        // it is a lie.
        if name == "two replies" {
            assert_eq!(data, [0x66; 4096], "{name}");
            assert_eq!(guarded_read(&nbd, 8192, 4096).1, lab.on_disk(8192, 4096), "{name}");
        } else {
            assert_eq!(data, lab.on_disk(8192, 4096), "{name}");
        }
        assert_eq!(lab.dialed.load(SeqCst), 2, "{name}");
    }
}

#[test]
fn false_write_reply_is_not_success() {
    for number in 0..3 {
        let lab = Lab::new(move |peer| {
            let Some(asked) = peer.ask() else { return };
            if peer.number == 0 {
                let lie = match number {
                    0 => chunk(
                        1,
                        wire::CHUNK_DATA,
                        asked.cookie,
                        &[&asked.offset.to_be_bytes()[..], &[1; 4096]].concat(),
                    ),
                    1 => chunk(
                        1,
                        wire::CHUNK_HOLE,
                        asked.cookie,
                        &[&asked.offset.to_be_bytes()[..], &[0, 0, 16, 0]].concat(),
                    ),
                    _ => simple(asked.cookie.wrapping_add(1), 0, &[]),
                };
                peer.send(&lie);
                return;
            }
            peer.answer(&asked);
        });
        let nbd = lab.client(export(), options());
        assert_eq!(nbd.write_at(4096, &[3; 4096]), Ok(4096));
        assert_eq!(lab.on_disk(4096, 4096), [3; 4096]);
        assert_eq!(nbd.stats().garbled, 1);
    }
}

#[test]
fn reply_before_request_is_rejected() {
    // The requests are too long for the sockets: the last is not out while the server answers it.
    let lab = Lab::new(|peer| {
        let Some(asked) = peer.ask() else { return };
        if peer.number == 0 {
            peer.send(&simple(asked.cookie + 7, 0, &[]));
            std::thread::sleep(Duration::from_millis(100));
            return;
        }
        peer.answer(&asked);
        peer.serve();
    });
    let nbd = lab.client(export(), options());
    let data = vec![5; 1 << 20];
    assert_eq!(nbd.write_at(0, &data), Ok(1 << 20));
    assert!(lab.on_disk(0, 1 << 20) == data);
    assert_eq!(nbd.stats().garbled, 1);
}

#[test]
fn server_with_only_false_replies_times_out() {
    let lab = Lab::new(|peer| {
        while peer.ask().is_some() {
            peer.send(&[0x66; 100]);
        }
    });
    let nbd =
        lab.client(export(), Options { read_timeout: Duration::from_millis(300), ..options() });
    let start = Instant::now();
    assert_eq!(guarded_read(&nbd, 0, 65536).0, Err(Errno::TIMEDOUT));
    assert!(start.elapsed() < Duration::from_secs(10));
    let stats = nbd.stats();
    // Not as fast as it can, either.
    assert!((2..40).contains(&stats.dialed) && stats.garbled + 1 >= stats.dialed, "{stats:?}");
}
