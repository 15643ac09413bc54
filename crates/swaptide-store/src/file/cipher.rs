//! Sealing and opening packed pages: AES-256-GCM-SIV with a key of this process's own.
//!
//! The processes that share a swap file share its key. Each derives its own from it and a salt that no other has, so a
//! counter is enough for the nonce. The place is authenticated with the object: one that turns up elsewhere does not open.

use aes_gcm_siv::aead::inout::InOutBuf;
use aes_gcm_siv::aead::{AeadInOut, KeyInit};
use aes_gcm_siv::{Aes256GcmSiv, Nonce};

/// Proves that an object is the one that was sealed.
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

    /// A secret of its own, for digests. The same for every cipher of this key and salt.
    pub(super) fn digest_key(&self) -> [u8; 16] {
        let mut key = [0; 16];
        self.aead
            .encrypt_inout_detached(&Nonce::from([0xff; 12]), b"swaptide digest key", key.as_mut_slice().into())
            .expect("16 bytes are within the cipher's limits");
        key
    }

    /// Encrypts `object` into `sealed`, which is as long. `counter` must never have been used with this cipher before.
    pub(super) fn seal(&self, counter: u64, place: [u8; 8], object: &[u8], sealed: &mut [u8]) -> Tag {
        let buffer = InOutBuf::new(object, sealed).expect("both are as long");
        self.aead.encrypt_inout_detached(&nonce(counter), &place, buffer).expect("an object is within the cipher's limits").into()
    }

    /// Decrypts in place; `false` when it is not the object that was sealed: its contents are then undefined.
    pub(super) fn open(&self, counter: u64, place: [u8; 8], tag: &Tag, object: &mut [u8]) -> bool {
        self.aead.decrypt_inout_detached(&nonce(counter), &place, object.into(), &(*tag).into()).is_ok()
    }

    /// As [`Self::open`], from one buffer into another of the same length.
    pub(super) fn open_into(&self, counter: u64, place: [u8; 8], tag: &Tag, sealed: &[u8], object: &mut [u8]) -> bool {
        let Ok(buffer) = InOutBuf::new(sealed, object) else { return false };
        self.aead.decrypt_inout_detached(&nonce(counter), &place, buffer, &(*tag).into()).is_ok()
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
        for len in [1, 100, PAGE_SIZE] {
            let object = vec![0x5a; len];
            let mut sealed = vec![0; len];
            let tag = cipher.seal(3, [10; 8], &object, &mut sealed);
            assert!(sealed != object);
            let open = |cipher: &Cipher, counter, place, flip: Option<usize>| {
                let mut copy = sealed.clone();
                if let Some(at) = flip {
                    copy[at] ^= 1;
                }
                let mut elsewhere = vec![0; len];
                let opens = cipher.open_into(counter, [place; 8], &tag, &copy, &mut elsewhere);
                assert_eq!(cipher.open(counter, [place; 8], &tag, &mut copy), opens);
                assert!(!opens || copy == elsewhere);
                opens.then_some(copy)
            };
            assert!(open(&cipher, 3, 10, None) == Some(object));
            assert!(open(&cipher, 4, 10, None).is_none(), "another counter");
            assert!(open(&cipher, 3, 11, None).is_none(), "another place");
            assert!(open(&cipher, 3, 10, Some(len - 1)).is_none(), "a flipped bit");
            assert!(open(&Cipher::new(&[1; 32], 8), 3, 10, None).is_none(), "another salt");
            assert!(open(&Cipher::new(&[2; 32], 7), 3, 10, None).is_none(), "another key");
        }
    }
}
