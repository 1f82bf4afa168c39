//! Descriptions of shards: which are refused, and how two of them are compared.
#![allow(clippy::unwrap_used)]

use kvlane_block::{
    Aspect, Axis, DescriptionError, Dimension, HeadPlace, Heads, LayerLayout, LayoutDifference, ShardLayout,
    ShardPlace,
};
use proptest::prelude::*;

fn dimension(axis: Axis, index: u32, size: u32) -> Dimension {
    Dimension { axis, index: Some(index), size }
}

/// A layer of Llama-3.1-8B as vLLM 0.32 keeps it, tokens inside of heads.
fn layer(number: usize, heads: u32) -> LayerLayout {
    LayerLayout {
        name: format!("model.layers.{number}.self_attn.attn"),
        part: 0,
        dtype: "torch.bfloat16".into(),
        element_bytes: 2,
        backend: "FLASH_ATTN".into(),
        dimensions: vec![
            dimension(Axis::Head, 0, heads),
            dimension(Axis::Token, 1, 16),
            dimension(Axis::Content, 2, 256),
        ],
        heads: Some(Heads { count: heads, size: 128, place: Some(HeadPlace { first: 0, total: 8 }) }),
        tokens: Some(16),
    }
}

fn shard(layers: usize, tensor_parallel: u32) -> ShardLayout {
    let place = ShardPlace { index: 0, holders: 1, tensor_parallel, pipeline_parallel: 1 };
    ShardLayout { place, layers: (0..layers).map(|number| layer(number, 8 / tensor_parallel)).collect() }
}

fn changed(change: impl Fn(&mut LayerLayout)) -> ShardLayout {
    let mut shard = shard(4, 1);
    change(&mut shard.layers[2]);
    shard
}

#[test]
fn a_shard_is_told_in_short() {
    assert_eq!(shard(32, 1).to_string(), "32 layers, 8 KV heads x 128, bfloat16, 16 tokens, HNC");
    assert_eq!(shard(1, 2).to_string(), "1 layer, 4 of 8 KV heads x 128, bfloat16, 16 tokens, HNC");
    assert_eq!(shard(32, 1).block_bytes(), 2 << 20);
    let states = |part| LayerLayout {
        name: "model.layers.1.mixer".into(),
        part,
        dimensions: vec![dimension(Axis::State, 0, 3)],
        heads: None,
        ..layer(1, 1)
    };
    let mixed = ShardLayout { layers: vec![layer(0, 8), states(0), states(1)], ..shard(1, 1) };
    assert_eq!(mixed.to_string(), "2 layers, 8 KV heads x 128, bfloat16, 16 tokens, HNC / S");
    mixed.check().unwrap();
    let many = (0..9).map(|number| LayerLayout { tokens: Some(16 + number as u32), ..layer(number, 8) });
    let text = ShardLayout { layers: many.collect(), ..shard(1, 1) }.to_string();
    assert!(text.contains("16 tokens / 17 tokens / 18 tokens / ...,"), "{text}");
}

#[test]
fn what_describes_no_bytes_is_refused_by_name() {
    type Change = fn(&mut ShardLayout);
    let cases: [(Change, &str); 16] = [
        (|shard| shard.layers.clear(), "with 0 layers"),
        (|shard| shard.layers = (0..4097).map(|number| layer(number, 8)).collect(), "with 4097 layers"),
        (|shard| shard.layers[1].name = layer(0, 8).name, "model.layers.0.self_attn.attn is described twice"),
        (|shard| shard.layers[1].name.clear(), "a layer's name has 0 bytes"),
        (|shard| shard.layers[1].name = "a".repeat(257), "a layer's name has 257 bytes"),
        (|shard| shard.layers[1].name = "two\nlines".into(), "not printed"),
        (|shard| shard.layers[1].dtype.clear(), "a data type has 0 bytes"),
        (|shard| shard.layers[1].backend = "b".repeat(65), "an attention backend's name has 65 bytes"),
        (|shard| shard.layers[1].element_bytes = 0, "the size of a number of a described shard is 0"),
        (|shard| shard.layers[1].dimensions = vec![dimension(Axis::Head, 0, 2); 9], "9 dimensions"),
        (|shard| shard.layers[1].dimensions[1].size = 0, "a dimension's size of a described shard is 0"),
        (|shard| shard.layers[1].dimensions = vec![dimension(Axis::Head, 0, u32::MAX); 3], "2^64 bytes"),
        (|shard| shard.layers[1].tokens = Some(0), "the number of tokens of a described shard is 0"),
        (
            |shard| {
                let place = Some(HeadPlace { first: 6, total: 8 });
                shard.layers[1].heads = Some(Heads { count: 4, size: 128, place });
            },
            "4 heads from number 6 on, of 8",
        ),
        (|shard| shard.place.holders = 0, "the number of ranks that hold a part of a described shard is 0"),
        (
            |shard| shard.place.index = 1,
            "shard 1 of 1 rank(s) each is described, of an engine with 1 rank(s)",
        ),
    ];
    shard(4, 1).check().unwrap();
    for (change, sentence) in cases {
        let mut shard = shard(4, 1);
        change(&mut shard);
        let error = shard.check().expect_err(sentence).to_string();
        assert!(error.contains(sentence), "{error:?} should contain {sentence:?}");
    }
    let huge = ShardPlace { index: u32::MAX, holders: u32::MAX, tensor_parallel: 8, pipeline_parallel: 1 };
    let error = ShardLayout { place: huge, ..shard(1, 1) }.check().unwrap_err();
    assert!(matches!(error, DescriptionError::Place { ranks: 8, .. }));
}

#[test]
fn the_first_differences_are_named_and_the_others_counted() {
    let text = shard(32, 1).compare(&shard(32, 2)).unwrap_err().to_string();
    assert_eq!(
        text,
        "tensor-parallel size: 1 here, 2 there; \
         layer model.layers.0.self_attn.attn: 8 KV heads x 128 (from number 0, of 8) here, \
         4 KV heads x 128 (from number 0, of 8) there; \
         layer model.layers.0.self_attn.attn: [head 8, token 16, content 256] here, \
         [head 4, token 16, content 256] there; and 62 more"
    );
    assert_eq!(shard(4, 1).compare(&shard(4, 1)), Ok(()));
}

#[test]
fn each_thing_that_differs_has_its_words() {
    const LAYER: &str = "layer model.layers.2.self_attn.attn: ";
    type Change = fn(&mut LayerLayout);
    let cases: [(Change, Aspect, &str); 7] = [
        (|layer| layer.tokens = Some(32), Aspect::Tokens, "16 tokens here, 32 tokens there"),
        (
            |layer| layer.dtype = "torch.float16".into(),
            Aspect::DataType,
            "torch.bfloat16 of 2 bytes here, torch.float16 of 2 bytes there",
        ),
        (
            |layer| layer.backend.clear(),
            Aspect::Backend,
            "attention backend FLASH_ATTN here, no attention backend there",
        ),
        (
            |layer| layer.dimensions.swap(0, 1),
            Aspect::Dimensions,
            "[head 8, token 16, content 256] here, [token 16, head 8, content 256] there",
        ),
        (
            |layer| layer.dimensions[2].index = Some(3),
            Aspect::Dimensions,
            "[head 8 (dimension 0), token 16 (dimension 1), content 256 (dimension 2)] here, \
             [head 8 (dimension 0), token 16 (dimension 1), content 256 (dimension 3)] there",
        ),
        (
            |layer| layer.heads = layer.heads.map(|heads| Heads { size: 64, place: None, ..heads }),
            Aspect::Heads,
            "8 KV heads x 128 (from number 0, of 8) here, 8 KV heads x 64 there",
        ),
        (
            |layer| layer.dimensions.clear(),
            Aspect::Dimensions,
            "[head 8, token 16, content 256] here, a single number there",
        ),
    ];
    for (change, aspect, words) in cases {
        let differences = shard(4, 1).compare(&changed(change)).unwrap_err();
        assert_eq!(differences.all()[0].aspect, aspect);
        assert_eq!(differences.to_string(), format!("{LAYER}{words}"));
        assert!(differences.certain().is_some());
    }
    let mut other = shard(4, 1);
    other.layers.remove(2);
    let differences = shard(4, 1).compare(&other).unwrap_err();
    assert_eq!(differences.to_string(), format!("{LAYER}present here, missing there"));
    let mut other = shard(4, 1);
    other.layers.swap(1, 2);
    let text = shard(4, 1).compare(&other).unwrap_err().to_string();
    assert!(text.ends_with(&format!("{LAYER}number 2 here, number 1 there")), "{text}");
}

#[test]
fn what_one_side_does_not_tell_is_no_certain_difference() {
    let changes: [fn(&mut LayerLayout); 4] = [
        |layer| layer.tokens = None,
        |layer| layer.heads = None,
        |layer| layer.heads = layer.heads.map(|heads| Heads { place: None, ..heads }),
        |layer| layer.dimensions[0].axis = Axis::Untold,
    ];
    for change in changes {
        let differences = shard(4, 1).compare(&changed(change)).unwrap_err();
        assert_eq!(differences.all().len(), 1);
        assert_eq!(differences.certain(), None);
    }
}

#[test]
fn axes_have_names_of_their_own() {
    for axis in Axis::ALL {
        assert_eq!(Axis::from_name(axis.name()), Some(axis));
    }
    assert_eq!(Axis::from_name("heads"), None);
}

/// Few values of each, so that two of them often agree.
fn any_layer() -> impl Strategy<Value = LayerLayout> {
    let axis = prop::sample::select(Axis::ALL.to_vec());
    let index = prop::option::of(0u32..2);
    let dimension = (axis, index, 1u32..3).prop_map(|(axis, index, size)| Dimension { axis, index, size });
    let place = prop::option::of((0u32..2, 4u32..6).prop_map(|(first, total)| HeadPlace { first, total }));
    let heads = (1u32..3, 1u32..3, place).prop_map(|(count, size, place)| Heads { count, size, place });
    (
        (prop::sample::select(vec!["l.0", "l.1", "l.2"]), 0u32..2),
        prop::sample::select(vec!["torch.bfloat16", "torch.uint8"]),
        prop::sample::select(vec!["", "FLASH_ATTN"]),
        prop::collection::vec(dimension, 0..3),
        (prop::option::of(heads), prop::option::of(1u32..3), 1u32..3),
    )
        .prop_map(|((name, part), dtype, backend, dimensions, (heads, tokens, element_bytes))| {
            LayerLayout {
                name: name.into(),
                part,
                dtype: dtype.into(),
                element_bytes,
                backend: backend.into(),
                dimensions,
                heads,
                tokens,
            }
        })
}

fn any_shard() -> impl Strategy<Value = ShardLayout> {
    let place = (0u32..2, 1u32..3, 4u32..6, 1u32..3).prop_map(|(index, holders, tensor, pipeline)| {
        ShardPlace { index, holders, tensor_parallel: tensor, pipeline_parallel: pipeline }
    });
    (place, prop::collection::vec(any_layer(), 1..5)).prop_map(|(place, mut layers)| {
        let mut seen = std::collections::HashSet::new();
        layers.retain(|layer| seen.insert((layer.name.clone(), layer.part)));
        ShardLayout { place, layers }
    })
}

/// Two that are often nearly the same.
fn pair() -> impl Strategy<Value = (ShardLayout, ShardLayout)> {
    (any_shard(), any_shard(), 0usize..4).prop_map(|(first, second, kept)| {
        let layers = first.layers.iter().take(kept).chain(&second.layers).cloned();
        let mut seen = std::collections::HashSet::new();
        let layers: Vec<_> = layers.filter(|layer| seen.insert((layer.name.clone(), layer.part))).collect();
        let place = if kept > 1 { first.place } else { second.place };
        let layers = if kept == 3 { first.layers.clone() } else { layers };
        (first, ShardLayout { place, layers })
    })
}

proptest! {
    #[test]
    fn two_shards_differ_unless_they_are_equal((here, there) in pair()) {
        prop_assert_eq!(here.check(), Ok(()));
        prop_assert_eq!(there.check(), Ok(()));
        prop_assert_eq!(here.compare(&there).is_ok(), here == there);
        prop_assert_eq!(here.compare(&here.clone()), Ok(()));
    }

    #[test]
    fn from_the_other_side_the_same_differs((here, there) in pair()) {
        let swapped = |difference: &LayoutDifference| LayoutDifference {
            here: difference.there.clone(),
            there: difference.here.clone(),
            ..difference.clone()
        };
        let found = here.compare(&there).map_or_else(|found| found.all().to_vec(), |()| Vec::new());
        let reversed = there.compare(&here).map_or_else(|found| found.all().to_vec(), |()| Vec::new());
        prop_assert_eq!(&found, &reversed.iter().map(swapped).collect::<Vec<_>>());
        for difference in &found {
            prop_assert_ne!(&difference.here, &difference.there, "{}", difference);
        }
    }
}
