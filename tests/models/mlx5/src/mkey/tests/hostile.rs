// SPDX-License-Identifier: MIT OR Apache-2.0

//! Commands, work requests and accesses with arbitrary content.

use super::*;

proptest! {
    #![proptest_config(config(2000))]

    /// No command, work request or access panics, and the count of translations stays correct.
    #[test]
    fn arbitrary_values_keep_translation_count(
        steps in proptest::collection::vec((0_u8..5, any::<[u64; 6]>(), proptest::collection::vec(any::<u8>(), 0..256)), 1..40),
    ) {
        let mut keys = Mkeys::new(Limits { keys: 16, words: 4096 });
        keys.enable_page_faults(true);
        for (step, numbers, bytes) in steps {
            let [a, b, c, d, e, f] = numbers;
            // Few different mkeys, so that most steps use an existing one. All other values are arbitrary.
            let key = ((FIRST + (a % 20) as u32) << 8) | (a >> 32) as u32 & 1;
            match step {
                0 => {
                    let mut command = create((b % 4) as u32, &[
                        (mkc::START_ADDR, c), (mkc::LEN, d), (mkc::LENGTH64, e & 1), (mkc::LOG_PAGE_SIZE, e >> 58),
                        (mkc::TRANSLATIONS_OCTWORD_SIZE, f), (mkc::FREE, (e >> 1) & 1),
                    ], &bytes);
                    if e & 4 != 0 {
                        let at = (b >> 8) as usize % command.len();
                        command[at] ^= (c & 0xff) as u8;
                    }
                    let _ = keys.create(&command);
                }
                1 => {
                    let mut body = vec![0; wqe_umr_ctrl_seg::BYTES + mkey_seg::BYTES];
                    wqe_umr_ctrl_seg::FLAGS.set(&mut body, b);
                    wqe_umr_ctrl_seg::MKEY_MASK.set(&mut body, c & 0x203e_20c3);
                    wqe_umr_ctrl_seg::XLT_OCTOWORDS.set(&mut body, d % 18);
                    wqe_umr_ctrl_seg::XLT_OFFSET.set(&mut body, if d & 64 != 0 { d >> 8 } else { (d >> 8) & 31 });
                    set(&mut body[48..], &[
                        (mkc::START_ADDR, e), (mkc::LEN, f), (mkc::LOG_PAGE_SIZE, b >> 8), (mkc::PD, PD.into()), (mkc::LR, 1),
                    ]);
                    body.extend_from_slice(&bytes);
                    if let Ok(umr) = Umr::read(key, &body) {
                        let _ = keys.apply(&umr, &bytes, if f & 1 == 0 { &USER } else { &DRIVER });
                    }
                }
                2 => {
                    let length = if d & 1 == 0 { c % 100_000 + 1 } else { c.max(1) };
                    let request = access(key, RIGHTS[(d >> 8) as usize % 5], if d & 2 == 0 { b } else { b % 100_000 }, length);
                    let mut extents = Vec::new();
                    let check = keys.check(&request);
                    let result = keys.resolve(&request, &mut extents);
                    if result.is_ok() {
                        prop_assert_eq!(check, Ok(()));
                        prop_assert_eq!(extents.iter().map(|extent| extent.len).sum::<u64>(), length);
                    } else {
                        prop_assert!(extents.is_empty());
                    }
                }
                3 => {
                    let _ = keys.invalidate(key, PD, QPN);
                    let _ = keys.resume_fault(b % 8, c & 1 == 0);
                }
                _ => {
                    let _ = keys.destroy(key >> 8);
                    let mut output = vec![0; ifc::query_mkey_out::BYTES];
                    let _ = keys.query(FIRST, &mut output);
                }
            }
            let words: u64 = keys.keys.iter().map(|(_, key)| key.translations.words()).sum();
            prop_assert_eq!(words, keys.words());
            prop_assert!(words <= 4096);
        }
    }
}
