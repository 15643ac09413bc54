use super::*;

#[test]
fn questions_are_a_line_of_json() {
    assert_eq!(serde_json::to_string(&Question::Stats).expect("JSON"), "\"stats\"");
    assert_eq!(
        serde_json::to_string(&Question::Swapoff("file:/tmp".into())).expect("JSON"),
        "{\"swapoff\":\"file:/tmp\"}"
    );
    assert!(serde_json::from_str::<Question>("\"swapoff everything\"").is_err());
}

#[test]
fn a_client_that_sends_a_byte_now_and_then_is_not_waited_for() {
    let (slow, client) = UnixStream::pair().expect("a pair");
    let sender = std::thread::spawn(move || {
        while (&slow).write_all(b"x").is_ok() {
            std::thread::sleep(REQUEST_TIMEOUT / 8);
        }
    });
    let began = Instant::now();
    let error = read_line(&client).expect_err("no end");
    assert!(matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock));
    assert!(began.elapsed() < 3 * REQUEST_TIMEOUT, "{:?}", began.elapsed());
    drop(client);
    sender.join().expect("it sends no more");
    let (client, other) = UnixStream::pair().expect("a pair");
    (&client).write_all(b"a line\nand more").expect("write");
    assert_eq!(read_line(&other).expect("whole"), b"a line");
}

#[test]
fn readahead_is_changed_whole_or_not_at_all() {
    let segment = crate::testing::segment();
    let pairs = |set: &[(&str, &str)]| -> Vec<(String, String)> {
        set.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect()
    };
    let change = |set: &[(&str, &str)]| change_readahead(&segment.header, &pairs(set));
    assert_eq!(
        change(&[]),
        Ok(pairs(&[("page-cluster", "default"), ("largest-order", "default")]))
    );
    assert_eq!(
        change(&[("largest-order", "0"), ("page-cluster", "9")]),
        Ok(pairs(&[("page-cluster", "9"), ("largest-order", "0")]))
    );
    for wrong in
        [("page-cluster", "10"), ("page-cluster", ""), ("window", "3"), ("largest-order", "-1")]
    {
        assert!(change(&[("largest-order", "4"), wrong]).is_err(), "{wrong:?}");
    }
    assert_eq!(
        change(&[("page-cluster", "default")]),
        Ok(pairs(&[("page-cluster", "default"), ("largest-order", "0")]))
    );
}
