// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the header parser, with small headers.

// The build script and this test use different parts of the module.
#[allow(dead_code)]
#[path = "../build/header.rs"]
mod header;

use header::{Headers, Layout};

fn read(text: &str) -> Headers {
    let mut headers = Headers::default();
    headers.read(text).unwrap();
    headers
}

fn places(layout: &Layout) -> Vec<(&str, u64, u64, Option<u64>)> {
    let members = layout.members.iter();
    members
        .map(|member| (member.name.as_str(), member.offset, member.width, member.count))
        .collect()
}

#[test]
fn bit_structures_have_bit_offsets() {
    let headers = read(
        "struct mlx5_ifc_inner_bits { u8 a[0x8]; u8 b[0x18]; };
         struct mlx5_ifc_outer_bits {
             u8 first[0x1]; /* one bit */
             u8 reserved_at_1[0x1f];
             u8 gid[16][0x8]; // sixteen bytes
             struct mlx5_ifc_inner_bits one;
             struct mlx5_ifc_inner_bits three[3];
             union { u8 x[0x20]; struct mlx5_ifc_inner_bits y; } either;
             union { u8 p[0x10]; u8 q[0x40]; };
             u8 pas[][0x40];
         };
         union mlx5_ifc_any_bits { u8 s[0x8]; u8 t[0x20]; };",
    );
    let outer = &headers.types["mlx5_ifc_outer_bits"];
    assert_eq!(
        places(outer),
        [
            ("first", 0, 1, None),
            ("reserved_at_1", 1, 31, None),
            ("gid", 32, 8, Some(16)),
            ("one", 160, 32, None),
            ("three", 192, 32, Some(3)),
            ("either_x", 288, 32, None),
            ("either_y", 288, 32, None),
            ("p", 320, 16, None),
            ("q", 320, 64, None),
            ("pas", 384, 64, Some(0)),
        ]
    );
    assert_eq!(outer.bits, 384);
    assert_eq!(headers.types["mlx5_ifc_any_bits"].bits, 32);
}

#[test]
fn c_structures_have_c_alignment() {
    let headers = read(
        "struct a { u8 x; __be32 y[2]; __be16 z; };
         struct b { u8 x; __be64 y; } __packed;
         struct c { struct a inner; u8 low:3; u8 high:5; u8 next; DECLARE_FLEX_ARRAY(u8, rest); };
         struct d { __be32 h; struct_group(trailer, u8 s; u8 t[3]; ); __be32 i; };",
    );
    let layout = |name: &str| &headers.types[name];
    assert_eq!(
        places(layout("a")),
        [("x", 0, 8, None), ("y", 32, 32, Some(2)), ("z", 96, 16, None)]
    );
    assert_eq!(layout("a").bits, 128);
    assert_eq!(places(layout("b")), [("x", 0, 8, None), ("y", 8, 64, None)]);
    assert_eq!(layout("b").bits, 72);
    assert_eq!(
        places(layout("c")),
        [
            ("inner", 0, 128, None),
            ("next", 136, 8, None),
            ("rest", 144, 8, Some(0))
        ]
    );
    assert_eq!(
        places(layout("d")),
        [
            ("h", 0, 32, None),
            ("s", 32, 8, None),
            ("t", 40, 8, Some(3)),
            ("i", 64, 32, None)
        ]
    );
}

#[test]
fn constants_are_computed() {
    let headers = read(
        "#define SIZE 0x10 /* bytes */
         #define CALL(x) ((x) + 1)
         enum named { A, B = 5, C, D = 1 << 3 | 2, E = (u64)1 << 40, F = BIT(4), G = GENMASK(5, 2), };
         enum { H = B * (SIZE - 1), I = UNKNOWN, J, K = 1ull << 47 };
         struct s { u8 data[SIZE / 2]; };",
    );
    let value = |name: &str| headers.constants.get(name).copied();
    let known = ["SIZE", "A", "B", "C", "D", "E", "F", "G", "H", "K"].map(|name| value(name).unwrap());
    assert_eq!(known, [16, 0, 5, 6, 10, 1 << 40, 16, 0x3c, 75, 1 << 47]);
    assert_eq!((value("I"), value("J"), value("CALL")), (None, None, None));
    assert_eq!(headers.types["s"].bits, 64);
}

#[test]
fn unsupported_declarations_are_skipped_or_rejected() {
    // A structure with a kernel type is skipped.
    let headers =
        read("struct list { struct list *next; void (*call)(int); }; static inline int f(void) { return 1; }");
    assert!(headers.types.is_empty());
    // An unknown type in an mlx5_ifc structure is an error.
    for text in [
        "struct mlx5_ifc_a_bits { u32 x[0x8]; };",
        "struct mlx5_ifc_a_bits { u8 x; };",
        "struct mlx5_ifc_a_bits { u8 x[WIDTH]; };",
        "struct mlx5_ifc_a_bits { struct mlx5_ifc_b_bits x; };",
        "struct mlx5_ifc_a_bits { u8 x[0x8] };",
    ] {
        assert!(Headers::default().read(text).is_err(), "{text}");
    }
}
