//! A shard's description decodes to what was encoded, and bytes that describe no shard are refused.
#![allow(clippy::unwrap_used)]

use kvlane_block::{
    Axis, DescriptionError, Dimension, HeadPlace, Heads, LayerLayout, ShardLayout, ShardPlace,
};
use kvlane_proto::{
    Message,
    shard_layout::{DESCRIBED_BYTES_MAX, DescribedError, decode_shard_layout, encode_shard_layout},
    v1,
};
use proptest::prelude::*;

fn any_layer() -> impl Strategy<Value = LayerLayout> {
    let axis = prop::sample::select(Axis::ALL.to_vec());
    let dimension = (axis, prop::option::of(0u32..9), 1u32..300).prop_map(|(axis, index, size)| Dimension {
        axis,
        index,
        size,
    });
    let place = prop::option::of((0u32..9, 17u32..99).prop_map(|(first, total)| HeadPlace { first, total }));
    let heads = (1u32..9, 1u32..999, place).prop_map(|(count, size, place)| Heads { count, size, place });
    (
        ("[ -~]{1,40}", 0u32..3, "[a-z0-9.]{1,20}", "[A-Z_]{0,20}"),
        prop::collection::vec(dimension, 0..=6),
        (prop::option::of(heads), prop::option::of(1u32..9999), 1u32..16),
    )
        .prop_map(|((name, part, dtype, backend), dimensions, (heads, tokens, element_bytes))| {
            LayerLayout { name, part, dtype, element_bytes, backend, dimensions, heads, tokens }
        })
}

fn any_shard() -> impl Strategy<Value = ShardLayout> {
    let place = (0u32..4, 1u32..4, 16u32..99, 1u32..9);
    let place = place.prop_map(|(index, holders, tensor_parallel, pipeline_parallel)| ShardPlace {
        index,
        holders,
        tensor_parallel,
        pipeline_parallel,
    });
    (place, prop::collection::vec(any_layer(), 1..6))
        .prop_map(|(place, layers)| ShardLayout { place, layers })
}

proptest! {
    #[test]
    fn a_description_arrives_as_it_was_sent(layout in any_shard()) {
        match encode_shard_layout(&layout) {
            Ok(bytes) => {
                prop_assert_eq!(decode_shard_layout(&bytes), Ok(layout.clone()));
                prop_assert_eq!(encode_shard_layout(&layout.clone()), Ok(bytes));
            }
            // Six dimensions of 300 are still within 2^64: only a name that comes twice is left.
            Err(error) => prop_assert_eq!(Err(error), layout.check().map_err(DescribedError::from)),
        }
    }

    #[test]
    fn bytes_describe_a_shard_or_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(layout) = decode_shard_layout(&bytes) {
            prop_assert_eq!(layout.check(), Ok(()));
            prop_assert_eq!(decode_shard_layout(&encode_shard_layout(&layout).unwrap()), Ok(layout));
        }
    }
}

fn message() -> v1::ShardLayout {
    let layer = v1::LayerLayout {
        name: "l.0".into(),
        dtype: "torch.uint8".into(),
        element_bytes: 1,
        dimensions: vec![v1::Dimension { size: 64, ..Default::default() }],
        ..Default::default()
    };
    v1::ShardLayout { holders: 1, tensor_parallel: 1, pipeline_parallel: 1, layers: vec![layer], index: 0 }
}

#[test]
fn what_a_message_leaves_out_is_untold() {
    let layout = decode_shard_layout(&message().encode_to_vec()).unwrap();
    let layer = &layout.layers[0];
    assert_eq!((layer.tokens, layer.heads, layer.dimensions[0].axis), (None, None, Axis::Untold));
    assert_eq!(layout.block_bytes(), 64);
    let mut later = message();
    later.layers[0].dimensions[0].axis = 99;
    assert_eq!(decode_shard_layout(&later.encode_to_vec()).unwrap(), layout, "an axis of a later version");
}

#[test]
fn what_describes_nothing_is_refused_with_the_reason() {
    assert!(matches!(decode_shard_layout(&[0xff; 8]), Err(DescribedError::Unreadable(_))));
    let layers = DescribedError::Wrong(DescriptionError::LayerCount(0));
    let empty = v1::ShardLayout { layers: Vec::new(), ..message() };
    assert_eq!(decode_shard_layout(&empty.encode_to_vec()), Err(layers));
    let mut heads = message();
    heads.layers[0].heads = Some(v1::KvHeads { count: 1, size: 128, first: 1, total: 0 });
    let error = decode_shard_layout(&heads.encode_to_vec()).unwrap_err();
    assert!(matches!(error, DescribedError::Wrong(DescriptionError::Heads { first: 1, total: 0, .. })));
    let error = decode_shard_layout(&vec![0; DESCRIBED_BYTES_MAX + 1]).unwrap_err();
    assert_eq!(error, DescribedError::TooLong(DESCRIBED_BYTES_MAX + 1));
    assert!(error.to_string().contains("1048577 bytes"));
}

#[test]
fn what_nobody_would_decode_is_not_encoded() {
    let mut layout = decode_shard_layout(&message().encode_to_vec()).unwrap();
    let named = |number: usize| LayerLayout { name: format!("{number:0256}"), ..layout.layers[0].clone() };
    let long: Vec<_> = (0..4096).map(named).collect();
    layout.layers = long;
    layout.check().unwrap();
    assert!(matches!(encode_shard_layout(&layout), Err(DescribedError::TooLong(_))));
    layout.layers.clear();
    assert!(matches!(encode_shard_layout(&layout), Err(DescribedError::Wrong(_))));
}
