//! Sealing and opening pages: AES-256-GCM-SIV with a key of this process's own.
//!
//! The processes that share a swap file share its key. Each derives its own from it and a salt that no other has, so a
//! counter is enough for the nonce. The location is authenticated with the page: a page that turns up elsewhere does not open.

use aes_gcm_siv::aead::inout::InOutBuf;
use aes_gcm_siv::aead::{AeadInOut, KeyInit};
use aes_gcm_siv::{Aes256GcmSiv, Nonce};

use crate::Page;

/// Proves that a page is the one that was sealed.
pub(super) type Tag = [u8; 16];

pub(super) struct Cipher {
    aead: Aes256GcmSiv,
}

impl Cipher {
    pub(super) fn new(key: &[u8; 32], salt: u64) -> Cipher {
        // The key stream of a nonce that page nonces (which end in zeros) never equal.
        let mut nonce = [0xff; 12];
        nonce[..8].copy_from_slice(&salt.to_le_bytes());
        let mut own = [0; 32];
        Aes256GcmSiv::new(key.into())
            .encrypt_inout_detached(&Nonce::from(nonce), b"swaptide file key", own.as_mut_slice().into())
            .expect("32 bytes are within the cipher's limits");
        Cipher { aead: Aes256GcmSiv::new(&own.into()) }
    }

    /// Encrypts `page` into `sealed`. `counter` must never have been used with this cipher before.
    pub(super) fn seal(&self, counter: u64, location: u32, page: &Page, sealed: &mut Page) -> Tag {
        let buffer = InOutBuf::new(&page[..], &mut sealed[..]).expect("both are a page");
        self.aead
            .encrypt_inout_detached(&nonce(counter), &location.to_le_bytes(), buffer)
            .expect("a page is within the cipher's limits")
            .into()
    }

    /// Decrypts in place; `false` when it is not the page that was sealed: its contents are then undefined.
    pub(super) fn open(&self, counter: u64, location: u32, tag: &Tag, page: &mut Page) -> bool {
        self.aead
            .decrypt_inout_detached(&nonce(counter), &location.to_le_bytes(), page.as_mut_slice().into(), &(*tag).into())
            .is_ok()
    }
}

fn nonce(counter: u64) -> Nonce {
    let mut nonce = [0; 12];
    nonce[..8].copy_from_slice(&counter.to_le_bytes());
    nonce.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PAGE_SIZE;

    #[test]
    fn opens_only_what_was_sealed_where_it_was_sealed() {
        let cipher = Cipher::new(&[1; 32], 7);
        let page = [0x5a; PAGE_SIZE];
        let mut sealed = [0; PAGE_SIZE];
        let tag = cipher.seal(3, 10, &page, &mut sealed);
        assert!(sealed != page);
        let open = |cipher: &Cipher, counter, location, flip: Option<usize>| {
            let mut copy = sealed;
            if let Some(at) = flip {
                copy[at] ^= 1;
            }
            cipher.open(counter, location, &tag, &mut copy).then_some(copy)
        };
        assert!(open(&cipher, 3, 10, None) == Some(page));
        assert!(open(&cipher, 4, 10, None).is_none(), "another counter");
        assert!(open(&cipher, 3, 11, None).is_none(), "another location");
        assert!(open(&cipher, 3, 10, Some(4095)).is_none(), "a flipped bit");
        assert!(open(&Cipher::new(&[1; 32], 8), 3, 10, None).is_none(), "another salt");
        assert!(open(&Cipher::new(&[2; 32], 7), 3, 10, None).is_none(), "another key");
    }
}
